"""OfflineNorm: a normalization that is, at inference, one affine map per channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from mmengine.dist import all_reduce
from torch import Tensor, nn

from slab_det.norms.precision import HALF, at_least_float32


class OfflineNorm(nn.Module, ABC):
    """A norm with two lives: its paper's rule in training, ``y = scale * x + shift`` at inference.

    Fusion, recalibration and the hooks know norms only through this class. A new norm is one subclass with a
    training forward, :meth:`inference_affine`, :meth:`statistics` and :meth:`set_statistics`. Its buffers are
    float32 at least, also after ``half()`` or ``bfloat16()``.

    Args:
        num_features: Channels C.
        eps: Added to the variance.

    Shape:
        (..., C) -> (..., C), channels last.

    Attributes:
        calibrating: Normalise with each batch's own statistics, as in training, and leave every state as it
            is. Set by :func:`slab_det.recalibrate` during its first pass, and later for norms that jumped.
        statistics_loaded: Whether a checkpoint brought running statistics of data. ``norm_eval`` freezes only those.
            A checkpoint from before any training, or of a LayerNorm model converted without calibration, has the
            initial ones, mean 0 and variance 1 in every channel: freezing them would switch the norm off.
        num_skipped: Of the norms of slab_det: training batches that were kept out of the statistics because of a NaN or
            an infinity, 0-d, since the norm was built; counted on the device, in no state dict, never reset. See
            :func:`skipped_batches`.
    """

    # What stands before running_mean and running_var in the norm's own state dict.
    STATISTICS_PREFIX = ''

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.calibrating = False
        self.statistics_loaded = False
        self.register_load_state_dict_post_hook(_raise_loaded_buffers)

    @abstractmethod
    def inference_affine(self) -> tuple[Tensor, Tensor]:
        """The norm at inference as float64 ``(scale, shift)``, each of shape (C,)."""

    @abstractmethod
    def statistics(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance per channel that inference uses, each of shape (C,)."""

    @abstractmethod
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        """Replaces the inference statistics by the population ``mean`` and ``var``, each of shape (C,)."""

    def check_channels(self, x: Tensor) -> None:
        """Raises ValueError unless the last dimension of ``x`` is ``num_features``."""
        if x.shape[-1] != self.num_features:
            raise ValueError(
                f'{type(self).__name__}({self.num_features}) takes (..., {self.num_features}), channels last; '
                f'got {tuple(x.shape)}'
            )

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As ever, but float32 at least, whatever ``torch.set_default_dtype`` says."""
        super().register_buffer(name, None if tensor is None else at_least_float32(tensor), persistent)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        given = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if given and not self.state_dict().keys() & given:
            # mmdet's own backbones load by key and would go on with random weights.
            raise RuntimeError(
                f'{prefix[:-1]}: the weights ({", ".join(given)}) are those of another norm than '
                f'{type(self).__name__}; load the file with slab_det.load_pretrained(backbone, FILE), '
                'or convert it first with tools/convert_checkpoint.py --to native'
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
        prefix += self.STATISTICS_PREFIX
        if f'{prefix}running_var' in state_dict:
            self.statistics_loaded = _are_estimated(
                state_dict.get(f'{prefix}running_mean'), state_dict[f'{prefix}running_var']
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OfflineNorm:
        """Moves and casts, but keeps statistics at float32 where ``fn`` lowers them to half precision.

        float16 ends at 65504, the variance of a sigma of 256, and an average of bfloat16 stands still once its steps
        are small.
        """
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        # From what they were: through half precision they may have become infinite.
        self.raise_buffers(before)
        return self

    def raise_buffers(self, values: dict[str, Tensor]) -> None:
        """Makes buffers in half precision float32, with these values."""
        for name, buffer in list(self.named_buffers()):
            if buffer.dtype in HALF:
                owner, _, key = name.rpartition('.')
                setattr(self.get_submodule(owner), key, values[name].to(buffer.device, torch.float32))

    def extra_repr(self) -> str:
        return f'{self.num_features}, eps={self.eps}'


def _raise_loaded_buffers(norm: OfflineNorm, incompatible_keys: object) -> None:
    """Runs when a norm and what it is made of are loaded: with ``assign=True`` buffers are those of the checkpoint."""
    norm.raise_buffers(dict(norm.named_buffers()))


def _are_estimated(mean: Tensor | None, var: Tensor) -> bool:
    """Whether these are anything but the initial statistics. Waits for their device, mostly the CPU."""
    return bool((var != 1).any()) or (mean is not None and bool(mean.any()))


def named_offline_norms(model: nn.Module) -> Iterator[tuple[str, OfflineNorm]]:
    """Yields every outermost OfflineNorm of ``model`` with its dotted name, in registration order.

    A norm made of other norms (PRepBN holds a RepBN) is one norm here.
    """
    inside: str | None = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, OfflineNorm):
            inside = f'{name}.' if name else ''
            yield name, module


def skipped_batches(model: nn.Module) -> dict[str, int]:
    """``num_skipped`` of every outermost OfflineNorm of ``model``, by name, of the process where it is largest.

    All processes must call it. One message and one read of the device for all norms.
    """
    counters = {name: norm.num_skipped for name, norm in named_offline_norms(model) if hasattr(norm, 'num_skipped')}
    if not counters:
        return {}
    counts = torch.stack([*counters.values()])
    all_reduce(counts, 'max')
    return dict(zip(counters, counts.tolist(), strict=True))


class ChannelAffine(nn.Module):
    """``y = scale * x + shift``: what is left of a norm that no neighbouring layer can take.

    Args:
        num_features: Channels C.

    Shape:
        (..., C) -> (..., C), channels last.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_features))
        self.shift = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)

    def extra_repr(self) -> str:
        return f'{self.scale.numel()}'
