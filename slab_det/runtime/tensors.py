"""Finds tensors in the outputs of modules."""

from __future__ import annotations

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_in(outputs: object) -> list[Tensor]:
    """Returns all tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
