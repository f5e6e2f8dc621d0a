"""Tensors made of sizes and settings alone, once for all calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any

import torch

# Largest number of constants of all models and sizes of images; the least recently used one goes first.
MAX_CONSTANTS = 1024
_made: OrderedDict[Hashable, Any] = OrderedDict()
_lock = RLock()
_recording = local()


def constant(key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns what ``make`` returned when this key was first asked for: tensors that nobody changes."""
    with _lock:
        if key not in _made:
            # The tensors outlive the mode that they are made in.
            with torch.inference_mode(False), torch.no_grad():
                _made[key] = make()
        _made.move_to_end(key)
        if len(_made) > MAX_CONSTANTS:
            _made.popitem(last=False)
        value = _made[key]
    if getattr(_recording, 'used', None) is not None:
        _recording.used.append(value)
    return value


@contextmanager
def used_constants() -> Iterator[list]:
    """Collects the constants that this thread asks for: a CUDA graph reads their memory, and has to keep them."""
    _recording.used = []
    try:
        yield _recording.used
    finally:
        _recording.used = None
