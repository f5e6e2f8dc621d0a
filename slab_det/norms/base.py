"""OfflineNorm: a normalization that is, at inference, one affine map per channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from slab_det.common.tensors import HALF_PRECISIONS

# Never entered: only asked whether a backward pass runs in this thread.
_TRACKER = ModuleTracker()


def at_least_float32(x: Tensor) -> Tensor:
    """Raises half precision to float32 and leaves float32 and float64 alone."""
    return x.float() if x.dtype in HALF_PRECISIONS else x


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, where activation checkpointing recomputes it."""
    return _TRACKER.is_bw


class OfflineNorm(nn.GroupNorm, ABC):
    """Base of norms that follow their paper in training, and are ``y = scale * x + shift`` at inference.

    A new norm is a subclass with :meth:`train_forward`, :meth:`inference_affine`, :meth:`statistics` and
    :meth:`set_statistics`. Its running statistics are buffers, which stay float32 when the module is cast to half
    precision. ``torch.compile`` does not trace the training forward.

    Args:
        num_features: Channels C.
        eps: Added to the variance.

    Shape:
        (..., C) -> (..., C), channels last.

    Raises:
        ValueError: If the last dimension is not ``num_features``.

    Attributes:
        calibrating: Normalise by the statistics of each batch, in training and evaluation, and keep the buffers.
        statistics_loaded: Whether a checkpoint held other statistics than the initial mean 0 and variance 1.
            ``norm_eval`` freezes only such norms: a norm frozen at its initial statistics would not normalise.
    """

    # A subclass of GroupNorm, because mmengine's optimizer constructors apply norm_decay_mult to PyTorch's norms only.
    # Tools convert a BatchNorm to SyncBatchNorm, fold it into a convolution, and find a LayerNorm by its class; they
    # leave a GroupNorm alone.
    affine = False
    calibrating = False
    statistics_loaded = False

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        nn.Module.__init__(self)
        self.num_features = num_features
        self.eps = eps
        self.register_load_state_dict_post_hook(_after_loading)

    @abstractmethod
    def train_forward(self, x: Tensor) -> Tensor:
        """Normalises a training batch ``x``, (..., C), in any precision, and updates the buffers in place.

        Activation checkpointing calls this method twice for each batch.
        """

    @abstractmethod
    def inference_affine(self) -> tuple[Tensor, Tensor]:
        """Computes ``(scale, shift)`` for inference, (C,) each, without casting parameters or buffers."""

    @abstractmethod
    def statistics(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance per channel that inference uses, (C,) each."""

    @abstractmethod
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        """Sets the statistics that inference uses to the population ``mean`` and ``var``, (C,) each."""

    def forward(self, x: Tensor) -> Tensor:
        self.check_channels(x)
        if self.training or self.calibrating:
            return self._train(x)
        scale, shift = self.inference_affine()
        values = at_least_float32(x)
        return torch.addcmul(shift.to(values.dtype), values, scale.to(values.dtype)).to(x.dtype)

    # torch.compile would build a graph for each value of gamma and of a counter.
    @torch.compiler.disable
    def _train(self, x: Tensor) -> Tensor:
        return self.train_forward(x)

    def read_numbers(self) -> None:
        """Copies 0-d buffers to Python numbers, which forward reads without a device sync.

        Loading calls it, and so does each change of mode by ``eval()`` or ``train()``: averages such as EMA write into
        buffers before a change. ``train()`` in training mode, which mmengine calls in each iteration, does not.
        """

    def train(self, mode: bool = True) -> OfflineNorm:
        if not (mode and self.training):
            self.read_numbers()
        return super().train(mode)

    def check_channels(self, x: Tensor) -> None:
        """Raises ValueError unless the last dimension of ``x`` is ``num_features``."""
        if x.shape[-1] != self.num_features:
            raise ValueError(
                f'{type(self).__name__}({self.num_features}) takes (..., {self.num_features}), channels last; '
                f'got {tuple(x.shape)}'
            )

    def check_weights(self, state_dict: dict, prefix: str) -> None:
        """Raises RuntimeError if ``state_dict`` holds weights under ``prefix``, and all belong to another norm."""
        given = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if given and not self.state_dict().keys() & given:
            # mmdet's own backbones skip keys that do not match, and would train on from random weights.
            raise RuntimeError(
                f'{prefix[:-1]}: the weights {", ".join(given)} belong to another norm than {type(self).__name__}; for '
                "load_from of a detector add default_hooks=dict(checked_load=dict(type='CheckedLoadHook')) to the "
                'config; load a backbone with slab_det.load_pretrained(backbone, FILE), or convert its file first with '
                'slab-det convert'
            )

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        self.check_weights(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OfflineNorm:
        """Moves and casts the norm, with its buffers in float32 where the cast is to half precision.

        A variance above 65504 overflows float16, and a running average in bfloat16 does not take small steps.
        """
        buffers = set(self.buffers())

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.dtype in HALF_PRECISIONS
            # Not from `moved`: a variance may have overflowed.
            return tensor.to(moved.device, torch.float32) if is_half and tensor in buffers else moved

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        return f'{self.num_features}, eps={self.eps}'


def read_number(tensor: Tensor, default: float) -> float:
    """The value of a 0-d tensor, or ``default`` for meta and fake tensors, which have none."""
    return tensor.item() if type(tensor) is Tensor and not tensor.is_meta else default


def _after_loading(norm: OfflineNorm, incompatible_keys: object) -> None:
    # load_state_dict(assign=True) may have assigned buffers in half precision.
    norm._apply(lambda tensor: tensor)
    norm.read_numbers()
    mean, var = norm.statistics()
    norm.statistics_loaded = bool(read_number(mean.any() | (var != 1).any(), default=True))


def named_norms(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) for modules of ``kinds``, in registration order, without submodules of an OfflineNorm.

    A PRepBN counts as one norm, although it holds a LayerNorm and a RepBN.
    """
    inside: str | None = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, OfflineNorm):
            inside = f'{name}.' if name else ''
        if isinstance(module, kinds):
            yield name, module


def named_offline_norms(model: nn.Module) -> Iterator[tuple[str, OfflineNorm]]:
    """Yields the OfflineNorms of ``model`` with their names; see :func:`named_norms`."""
    return named_norms(model, OfflineNorm)


def check_norm_weights(model: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Refuses weights of other norms before the first weight is copied; a pre-hook of ``load_state_dict``."""
    for name, norm in named_offline_norms(model):
        norm.check_weights(state_dict, f'{prefix}{name}.')


class ChannelAffine(nn.Module):
    """``y = scale * x + shift`` on (..., C): replaces a norm that fusion cannot fold into a neighbouring layer."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_features))
        self.shift = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)

    def extra_repr(self) -> str:
        return f'{self.scale.numel()}'
