"""Finds, changes and checks tensors of modules, and of their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mmengine.utils import apply_to
from torch import Tensor, nn

from slab_det.common.errors import SlabDetError, name_some
from slab_det.precisions import precisions_of

# The precisions in which PyTorch runs a detector, but for float32.
HALF_PRECISIONS = tuple(getattr(torch, name) for name in precisions_of('torch') if name != 'float32')


def tensors_in(outputs: object) -> list[Tensor]:
    """Returns all tensors in nested tuples, lists and dicts."""
    found = []
    map_tensors(found.append, outputs)
    return found


def map_tensors(function: Callable[[Tensor], object], values: object) -> object:
    """Copies nested tuples, lists and dicts, with ``function(x)`` in place of each tensor x."""
    return apply_to(values, lambda x: isinstance(x, Tensor), function)


def check_finite(model: nn.Module, error: type[SlabDetError]) -> None:
    """Raises ``error``, which names them, if parameters or buffers of ``model`` hold NaN or infinite values."""
    # A tensor on the meta device has no values.
    state = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value) and not value.is_meta}
    damaged = [name for name, value in state.items() if not value.isfinite().all()]
    if damaged:
        raise error(
            f'{len(damaged)} of {len(state)} tensors hold NaN or infinite values ({name_some(damaged)}): '
            'the training diverged or the file is damaged; take an earlier checkpoint'
        )
