"""How far long work is."""

import sys
from typing import Any

from tqdm import tqdm


class Progress(tqdm):
    """tqdm; where stderr is no terminal, a line at each tenth stands for the bar, which is drawn over itself.

    Args:
        args, kwargs: As tqdm takes them.
    """

    # No thread beside data loaders, whose workers are forked.
    monitor_interval = 0
    _tenths = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, leave=sys.stderr.isatty(), dynamic_ncols=True, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """What tqdm calls to draw the bar, and to remove the bar that shall not stay."""
        if self.leave:
            return super().display(msg, pos)
        tenths = 10 * self.n // self.total if self.total else 0
        if tenths > self._tenths:
            self._tenths = tenths
            self.fp.write(f'{self}\n')
