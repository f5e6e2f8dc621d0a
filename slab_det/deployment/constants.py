"""A cache of tensors that depend on sizes and settings alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any

import torch

# Largest number of constants, of all models and sizes of images; beyond it the least recently used one is dropped.
MAX_CONSTANTS = 1024
_made: OrderedDict[Hashable, Any] = OrderedDict()
_lock = RLock()
_recording = local()


def constant(key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the tensors that ``make`` returned at the first call with this key; nobody may change them."""
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
    """Collects the constants that this thread asks for: a CUDA graph reads their memory, and keeps them alive."""
    _recording.used = []
    try:
        yield _recording.used
    finally:
        _recording.used = None
