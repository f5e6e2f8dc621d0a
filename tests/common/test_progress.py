"""Progress on a terminal and in a log file."""

import io

import pytest
import tqdm.std

from slab_det.common.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, seconds: float = 0, bars: int = 1) -> str:
    """What bars of 1000 steps print, each step of so many seconds."""
    now = 0.0
    monkeypatch.setattr('sys.stderr', stream)
    monkeypatch.setattr(tqdm.std, 'time', lambda: now)
    monkeypatch.setattr(Progress, '_last_line', None)
    for index in range(bars):
        for _ in Progress(range(1000), f'Work {index}', mininterval=0):
            now += seconds
    print('Next', file=stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ('seconds', 'bars', 'shares'),
    [
        (3, 1, [(0, share) for share in range(10, 101, 10)]),
        (0.024, 1, [(0, 83)]),
        # Short work is no news, but a long row of it is.
        (0.001, 1, []),
        (0.0085, 5, [(2, 35), (4, 71)]),
    ],
)
def test_file_gets_a_line_per_ten_percent_and_twenty_seconds(
    seconds: float, bars: int, shares: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = show(io.StringIO(), monkeypatch, seconds, bars).splitlines()
    assert [line.split('|')[0] for line in lines] == [f'Work {bar}: {share:3}%' for bar, share in shares] + ['Next']


def test_a_terminal_gets_a_bar_that_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(Terminal(), monkeypatch)
    # tqdm pads with spaces to erase a longer bar.
    assert text.count('\r') > 400 and text.replace(' ', '').endswith(']\nNext\n') and text.count('\n') == 2
