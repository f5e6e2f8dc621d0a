"""What the tracer must see as arithmetic on sizes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def _unflatten(self: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    dim %= self.ndim
    # Only the sizes of one dimension are given: the others must come from the shape, not from a -1 of their own.
    return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])


@contextmanager
def traced_sizes() -> Iterator[None]:
    """While an exporter traces, sizes stay sizes.

    ``Tensor.unflatten`` turns its sizes into constants on the way to its view; a reshape does not. The tracer's
    warnings that something might be a constant are silenced:
    :mod:`slab_det.deployment.export.parity` finds out at other sizes.
    """
    original = Tensor.unflatten
    Tensor.unflatten = _unflatten
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', category=torch.jit.TracerWarning)
            warnings.filterwarnings('ignore', category=DeprecationWarning)
            warnings.filterwarnings('ignore', category=UserWarning, module='torch.onnx')
            yield
    finally:
        Tensor.unflatten = original
