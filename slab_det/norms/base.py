"""OfflineNorm: a normalization that is, at inference, one affine map per channel."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def at_least_float32(x: Tensor) -> Tensor:
    """Raises half precision to float32 and leaves float32 and float64 alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as activation checkpointing of either kind recomputes it."""
    # -1 means "no backward in this thread".
    return torch._C._current_graph_task_id() != -1


class OfflineNorm(nn.Module, ABC):
    """A norm with two lives: its paper's rule in training, ``y = scale * x + shift`` at inference.

    Fusion, recalibration, conversion and the hooks know norms only through this class. A new norm is a subclass with
    :meth:`train_forward`, :meth:`inference_affine`, :meth:`statistics` and :meth:`set_statistics`; buffers hold what
    it averages. The base class does the rest:

    - evaluation is the affine map, differentiable in the parameters;
    - a training batch that would make a buffer NaN or infinite changes no buffer, and ``num_skipped`` counts it on the
      device. Mixed precision makes such batches now and then, and no average would ever forget one;
    - the recomputation of activation checkpointing changes no buffer, and neither does ``calibrating``;
    - buffers are float32 at least, whatever casts the module, the default dtype or a checkpoint say.

    torch.compile breaks its graph around the training forward and runs it as it is. Evaluation compiles.

    Args:
        num_features: Channels C.
        eps: Added to the variance.

    Shape:
        (..., C) -> (..., C), channels last.

    Raises:
        ValueError: If the last dimension is not ``num_features``.

    Attributes:
        calibrating: Normalise with the statistics of each batch, as in training, and change no buffer. Set by
            :func:`slab_det.recalibrate` while statistics are collected.
        statistics_loaded: Whether a checkpoint brought statistics of data. ``norm_eval`` freezes only such statistics:
            frozen at the initial ones, mean 0 and variance 1, a norm would be switched off.
        num_skipped: Training batches kept out of the buffers since the norm was built, 0-d; in no state dict.
    """

    calibrating = False
    statistics_loaded = False

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.register_buffer('num_skipped', torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)

    @abstractmethod
    def train_forward(self, x: Tensor) -> Tensor:
        """Normalises a training batch ``x``, (..., C), and updates the buffers in place.

        ``x`` may be in half precision, see :func:`at_least_float32`.
        """

    @abstractmethod
    def inference_affine(self) -> tuple[Tensor, Tensor]:
        """``(scale, shift)`` of inference, (C,) each, from parameters and buffers in their own dtypes."""

    @abstractmethod
    def statistics(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance per channel that inference uses, (C,) each."""

    @abstractmethod
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        """Replaces the statistics of inference by the population ``mean`` and ``var``, (C,) each."""

    def forward(self, x: Tensor) -> Tensor:
        self.check_channels(x)
        if self.training or self.calibrating:
            return self._train(x)
        scale, shift = self.inference_affine()
        values = at_least_float32(x)
        return torch.addcmul(shift.to(values.dtype), values, scale.to(values.dtype)).to(x.dtype)

    # A graph can hold neither the choice of buffers to keep nor the state that quadratic norms leave for backward.
    @torch.compiler.disable
    def _train(self, x: Tensor) -> Tensor:
        with self._updating_buffers(not self.calibrating and not is_recomputing(), self.num_skipped):
            return self.train_forward(x)

    @contextmanager
    def _updating_buffers(self, keep: bool = True, counter: Tensor | None = None) -> Iterator[None]:
        """Lets the block change copies of the buffers, and keeps them if all are finite; else adds to ``counter``."""
        modules = [module for module in self.modules() if module._buffers]
        originals = [module._buffers for module in modules]
        # Autograd may hold the copies: nothing changes them after the block.
        copies = [{name: buffer.clone() for name, buffer in buffers.items()} for buffers in originals]
        _set_buffers(modules, copies)
        try:
            yield
        finally:
            _set_buffers(modules, originals)
        if not keep:
            return
        with torch.no_grad():
            pairs = [(old[name], new[name]) for old, new in zip(originals, copies, strict=True) for name in old]
            # 0 times NaN or infinity is NaN, which counts as true: half as many kernels as isfinite().
            is_bad = (0 * torch.cat([value.flatten() for _, value in pairs if value.is_floating_point()])).any()
            for buffer, value in pairs:
                torch.where(is_bad, buffer, value, out=buffer)
            if counter is not None:
                counter += is_bad

    def float64_affine(self) -> tuple[Tensor, Tensor]:
        """:meth:`inference_affine` computed in float64 and without gradient, as folding needs it."""
        scale, shift = copy_module(self).double().inference_affine()
        return scale.detach(), shift.detach()

    def check_channels(self, x: Tensor) -> None:
        """Raises ValueError unless the last dimension of ``x`` is ``num_features``."""
        if x.shape[-1] != self.num_features:
            raise ValueError(
                f'{type(self).__name__}({self.num_features}) takes (..., {self.num_features}), channels last; '
                f'got {tuple(x.shape)}'
            )

    def register_buffer(self, name: str, tensor: Tensor, persistent: bool = True) -> None:
        """Registers ``tensor`` in float32 where ``torch.set_default_dtype`` made it half precision."""
        super().register_buffer(name, at_least_float32(tensor), persistent)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        given = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if given and not self.state_dict().keys() & given:
            # mmdet's own backbones load by key and would go on with random weights.
            raise RuntimeError(
                f'{prefix[:-1]}: the weights ({", ".join(given)}) are those of another norm than '
                f'{type(self).__name__}; for load_from of a detector add '
                "default_hooks=dict(checked_load=dict(type='CheckedLoadHook')) to the config; load a backbone with "
                'slab_det.load_pretrained(backbone, FILE), or convert its file first with slab-det convert --to native'
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OfflineNorm:
        """Moves and casts, but keeps buffers at float32 where ``fn`` lowers them to half precision.

        float16 ends at 65504, the variance of a sigma of 256, and an average of bfloat16 stands still once its steps
        are small.
        """
        buffers = set(self.buffers())

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.dtype in (torch.float16, torch.bfloat16)
            # Not from `moved`: half precision may have made it infinite.
            return tensor.to(moved.device, torch.float32) if is_half and tensor in buffers else moved

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        return f'{self.num_features}, eps={self.eps}'


class _DetachedCopies(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy, with tensors of a graph detached: detectors such as CondInst keep some of their last step."""
    with _DetachedCopies():
        return copy.deepcopy(module)


def _set_buffers(modules: list[nn.Module], values: list[dict[str, Tensor]]) -> None:
    for module, buffers in zip(modules, values, strict=True):
        module._buffers = buffers


def _after_loading(norm: OfflineNorm, incompatible_keys: object) -> None:
    # load_state_dict(assign=True) takes the checkpoint's tensors as they are: this raises buffers in half precision.
    norm._apply(lambda tensor: tensor)
    mean, var = norm.statistics()
    norm.statistics_loaded = bool(mean.any() or (var != 1).any())


def named_norms(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module of ``kinds`` that is no part of an OfflineNorm, with its name, in registration order.

    A norm made of other norms (PRepBN holds a LayerNorm and a RepBN) is one norm here.
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
    """Yields every OfflineNorm of ``model`` that is no part of another, with its name, in registration order."""
    return named_norms(model, OfflineNorm)


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
