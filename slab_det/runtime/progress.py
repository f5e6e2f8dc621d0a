"""Shows the progress of long work on terminals and in log files."""

import sys
from typing import Any

from tqdm import tqdm

# Least time between two lines in a log file.
SECONDS = 5


class Progress(tqdm):
    """A tqdm bar. If stderr is not a terminal, it prints at most a line per 10% and per 5 seconds, and one at the end.

    Args:
        args, kwargs: Arguments of tqdm.
    """

    # No monitor thread, because DataLoader forks its workers.
    monitor_interval = 0
    _tenths = 0
    _last_line: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, leave=sys.stderr.isatty(), dynamic_ncols=True, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Draws the bar or prints a line; called by tqdm."""
        if self.leave:
            return super().display(msg, pos)
        now, tenths = self._time(), 10 * self.n // self.total if self.total else 0
        if self._last_line is None:
            self._last_line = now
        if tenths > self._tenths and (now - self._last_line >= SECONDS or tenths == 10):
            self._tenths, self._last_line = tenths, now
            self.fp.write(f'{self}\n')
