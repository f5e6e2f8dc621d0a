"""Progress on a terminal and in a log file."""

import io
from collections.abc import Iterable

import pytest
import tqdm.std

from slab_det.runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, seconds: float = 0) -> str:
    """What 1000 steps print, each of so many seconds."""
    now = 0.0
    monkeypatch.setattr('sys.stderr', stream)
    monkeypatch.setattr(tqdm.std, 'time', lambda: now)
    for _ in Progress(range(1000), 'Work', mininterval=0):
        now += seconds
    print('Next', file=stream)
    return stream.getvalue()


@pytest.mark.parametrize(('seconds', 'shares'), [(1, range(10, 101, 10)), (0.006, (83, 100)), (0.001, (100,))])
def test_file_gets_a_line_per_ten_percent_and_five_seconds(
    seconds: float, shares: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = show(io.StringIO(), monkeypatch, seconds).splitlines()
    assert [line.split('|')[0] for line in lines] == [f'Work: {share:3}%' for share in shares] + ['Next']


def test_a_terminal_gets_a_bar_that_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(Terminal(), monkeypatch)
    # tqdm pads with spaces to erase a longer bar.
    assert text.count('\r') > 400 and text.replace(' ', '').endswith(']\nNext\n') and text.count('\n') == 2
