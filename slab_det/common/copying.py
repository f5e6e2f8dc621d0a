"""Copies modules."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


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
