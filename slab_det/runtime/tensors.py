"""Finds and changes tensors in the inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Callable

from mmengine.utils import apply_to
from torch import Tensor


def tensors_in(outputs: object) -> list[Tensor]:
    """Returns all tensors in nested tuples, lists and dicts."""
    found = []
    map_tensors(found.append, outputs)
    return found


def map_tensors(function: Callable[[Tensor], object], values: object) -> object:
    """Copies nested tuples, lists and dicts, with ``function(x)`` in place of each tensor x."""
    return apply_to(values, lambda x: isinstance(x, Tensor), function)
