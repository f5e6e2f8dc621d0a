"""Caches tensors that depend only on sizes and settings, so that a CUDA graph reads them instead of making them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from threading import local
from typing import Any

import torch

_recording = local()


def constant(keep: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that makes tensors, and keeps its last ``keep`` results, which callers must not change."""

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        # Later calls, in other modes, get the same tensors: inference tensors could not serve all of them.
        kept = lru_cache(keep)(torch.inference_mode(False)(torch.no_grad()(make)))

        @wraps(make)
        def get(*args: Any) -> Any:
            value = kept(*args)
            getattr(_recording, 'used', []).append(value)
            return value

        return get

    return decorate


@contextmanager
def used_constants() -> Iterator[list]:
    """Collects the constants that this thread reads, so that a CUDA graph keeps alive the memory that it reads."""
    _recording.used = []
    try:
        yield _recording.used
    finally:
        del _recording.used
