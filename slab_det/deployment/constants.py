"""Tensors that depend on sizes and settings alone, and that CUDA graphs read: made once, before a graph is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from threading import local
from typing import Any

import torch

_recording = local()


def constant(make: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that makes tensors, to keep its last 1,024 results; nobody may change these tensors."""
    # The tensors outlive the mode that they are made in.
    kept = lru_cache(1024)(torch.inference_mode(False)(torch.no_grad()(make)))

    @wraps(make)
    def get(*args: Any) -> Any:
        value = kept(*args)
        getattr(_recording, 'used', []).append(value)
        return value

    return get


@contextmanager
def used_constants() -> Iterator[list]:
    """Collects the constants that this thread reads; a CUDA graph reads their memory, and keeps them alive."""
    _recording.used = []
    try:
        yield _recording.used
    finally:
        del _recording.used
