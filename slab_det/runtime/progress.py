"""Shows the progress of long work on terminals and in log files."""

import sys
from typing import Any

from tqdm import tqdm


class Progress(tqdm):
    """A tqdm bar that prints one line per 10% instead if stderr is not a terminal.

    Args:
        args, kwargs: Arguments of tqdm.
    """

    # No monitor thread, because DataLoader forks its workers.
    monitor_interval = 0
    _tenths = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, leave=sys.stderr.isatty(), dynamic_ncols=True, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Draws the bar or prints a line; called by tqdm."""
        if self.leave:
            return super().display(msg, pos)
        tenths = 10 * self.n // self.total if self.total else 0
        if tenths > self._tenths:
            self._tenths = tenths
            self.fp.write(f'{self}\n')
