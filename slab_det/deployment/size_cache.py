"""What depends on the size of the input only, computed once per size."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

# Test sets keep the aspect ratio of their images: sizes are many, and the same ones come again.
MAX_SIZES = 32


class SizeCached(nn.Module):
    """A module that keeps values per input size, and forgets them when its weights may have changed."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``; of the last ``MAX_SIZES`` keys none is made twice."""
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = make()
            if len(self._kept) > MAX_SIZES:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _apply(self, *args: Any, **kwargs: Any) -> SizeCached:
        self._kept.clear()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._kept.clear()
        super()._load_from_state_dict(*args, **kwargs)
