"""Shows the progress of long work on terminals and in log files."""

import sys
from typing import Any

from tqdm import tqdm

# Least time between two lines of any bars in a log file.
SECONDS = 20


class Progress(tqdm):
    """A tqdm bar. If stderr is not a terminal, it prints at most a line per 10%, and all bars a line per 20 seconds.

    Args:
        args, kwargs: Arguments of tqdm.
    """

    # No monitor thread, because DataLoader forks its workers.
    monitor_interval = 0
    _tenths = 0
    # When this process printed a line, or began the first bar.
    _last_line: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, leave=sys.stderr.isatty(), dynamic_ncols=True, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Draws the bar or prints a line; called by tqdm."""
        if self.leave:
            return super().display(msg, pos)
        now, tenths = self._time(), 10 * self.n // self.total if self.total else 0
        if Progress._last_line is None:
            Progress._last_line = now
        if tenths > self._tenths and now - Progress._last_line >= SECONDS:
            self._tenths = tenths
            Progress._last_line = now
            self.fp.write(f'{self}\n')
