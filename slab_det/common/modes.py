"""The modes of a model: training or evaluation, and whether it is deployed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn


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


def is_deployed(model: nn.Module) -> bool:
    """Whether :func:`slab_det.deploy` made this model, and marked it by the attribute ``deployed``."""
    return getattr(model, 'deployed', False)
