"""What every part does with a module: copies it, sets its mode, asks what it reads, and runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar('Module', bound=nn.Module)


class _DetachedCopies(TorchFunctionMode):
    """Makes ``copy.deepcopy`` detach non-leaf tensors, which PyTorch refuses to copy."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def copy_module(module: nn.Module) -> nn.Module:
    """Returns a deep copy; tensors that a module such as CondInst keeps from its last step are detached."""
    with _DetachedCopies():
        return copy.deepcopy(module)


def as_class(layer: nn.Module, kind: type[Module]) -> Module:
    """Makes a ``kind`` that shares the parameters and parts of ``layer``; the two classes differ in their forward."""
    new = kind.__new__(kind)
    # With dicts of its own for parameters and parts: what is replaced in one of both stays in the other.
    vars(new).update({name: value.copy() if isinstance(value, dict) else value for name, value in vars(layer).items()})
    return new


def set_mode(module: nn.Module, training: bool) -> None:
    """Sets the mode of a module and its parts as ``train()`` does, but norms keep their numbers: no device sync."""
    for part in module.modules():
        part.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module of ``model`` into eval mode, and back afterwards; ``train()`` would not restore all."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, 'training', module.training)
            module.training = False
        yield


@contextmanager
def given_features(model: nn.Module, features: Sequence[Tensor]) -> Iterator[None]:
    """Within it a detector takes these feature maps, (B, C, H, W) each, as those of any images; no backbone runs."""
    model.extract_feat = lambda *_: features
    try:
        yield
    finally:
        del model.extract_feat


@contextmanager
def changed_test_cfgs(model: nn.Module, change: Callable[[dict], dict]) -> Iterator[None]:
    """Within it every ``test_cfg`` in ``model`` is a copy, with the values that ``change`` returns for it."""
    originals = [(part, part.test_cfg) for part in model.modules() if isinstance(getattr(part, 'test_cfg', None), dict)]
    try:
        for part, cfg in originals:
            part.test_cfg = type(cfg)({**cfg, **change(cfg)})
        yield
    finally:
        for part, cfg in originals:
            part.test_cfg = cfg


def is_deployed(model: nn.Module) -> bool:
    """Whether :func:`slab_det.deploy` made this model, and marked it by the attribute ``deployed``."""
    return getattr(model, 'deployed', False)


def input_channels(model: nn.Module) -> int:
    """Number of channels of the images that a detector or backbone reads: its first convolution's, or 3 without one."""
    # Deployed models have convolutions of other classes.
    parts = getattr(model, 'backbone', model).modules()
    return next(
        (part.in_channels for part in parts if hasattr(part, 'kernel_size') and hasattr(part, 'in_channels')), 3
    )


def extract_features(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """The feature maps of a detector's neck, or of a backbone, for images (B, C, H, W)."""
    return model.extract_feat(images) if hasattr(model, 'extract_feat') else model(images)
