"""Tensors made of sizes and settings alone, once for all calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any

import torch

_recording = local()


class Constants:
    """Keeps what was made for a key; the least recently used goes beyond ``size``."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, RLock()
        self._made: OrderedDict[Hashable, Any] = OrderedDict()

    def __call__(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returned for this key: tensors that nobody changes."""
        with self._lock:
            if key not in self._made:
                # They outlive the mode they were made in.
                with torch.inference_mode(False), torch.no_grad():
                    self._made[key] = make()
            self._made.move_to_end(key)
            if len(self._made) > self._size:
                self._made.popitem(last=False)
            value = self._made[key]
        for used in getattr(_recording, 'lists', ()):
            used.append(value)
        return value

    def __reduce__(self) -> tuple:
        # Copies and files make the tensors again.
        return Constants, (self._size,)


# Of all models and sizes of images together.
constant = Constants(1024)


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
