"""Tensors made of sizes and settings alone, once for all calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

import torch

# Of all models and sizes together, the most recently used.
MAX_CONSTANTS = 1024

_made: OrderedDict[Hashable, Any] = OrderedDict()
_lock, _recording = Lock(), local()


def constant(key: Hashable, make: Callable[[], Any]) -> Any:
    """What ``make`` returned for this key, tensors that nobody changes."""
    with _lock:
        if key not in _made:
            # They outlive the mode they were made in.
            with torch.inference_mode(False), torch.no_grad():
                _made[key] = make()
        _made.move_to_end(key)
        if len(_made) > MAX_CONSTANTS:
            _made.popitem(last=False)
        value = _made[key]
    for used in getattr(_recording, 'lists', ()):
        used.append(value)
    return value


@contextmanager
def used_constants() -> Iterator[list]:
    """The constants that this thread asks for: a CUDA graph reads their memory, and has to keep them."""
    if not hasattr(_recording, 'lists'):
        _recording.lists = []
    used: list = []
    _recording.lists.append(used)
    try:
        yield used
    finally:
        _recording.lists.remove(used)
