"""What depends on the size of the input only, computed once per size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

# Test sets keep the aspect ratio of their images: sizes are many, and the same ones come again.
MAX_SIZES = 32


class SizeCached(nn.Module):
    """A module that keeps values per input size.

    It forgets them when weights are loaded or moved, and in ``train()`` and ``eval()``; a weight that is written in
    place otherwise goes unnoticed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._pinned: set[Hashable] = set()

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``; of the last ``MAX_SIZES`` keys none is made twice."""
        if torch.compiler.is_compiling() and key in self._kept:
            # A compiler guards what it changes.
            return self._kept[key]
        if key not in self._kept:
            # What is kept outlives the mode it was made in.
            with torch.inference_mode(False), torch.no_grad():
                self._kept[key] = make()
            self._drop_oldest()
        self._kept.move_to_end(key)
        return self._kept[key]

    def pin(self) -> None:
        """Never drops what is there now: compiled code and CUDA graphs hold it by address."""
        self._pinned.update(self._kept)

    def _drop_oldest(self) -> None:
        loose = [key for key in self._kept if key not in self._pinned]
        for key in loose[: max(len(loose) - MAX_SIZES, 0)]:
            del self._kept[key]

    def _forget(self) -> None:
        self._kept.clear()
        self._pinned.clear()

    def train(self, mode: bool = True) -> SizeCached:
        self._forget()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> SizeCached:
        self._forget()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)


def pin_sizes(model: nn.Module) -> None:
    """Pins what every module keeps now, see :meth:`SizeCached.pin`."""
    for module in model.modules():
        if isinstance(module, SizeCached):
            module.pin()
