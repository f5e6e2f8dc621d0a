"""Progress on a terminal and in a log file."""

import io

import pytest

from slab_det.runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, count: int) -> str:
    monkeypatch.setattr('sys.stderr', stream)
    for _ in Progress(range(count), 'Work', mininterval=0):
        pass
    print('Next', file=stream)
    return stream.getvalue()


def test_file_gets_one_line_per_ten_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = show(io.StringIO(), monkeypatch, 1000).splitlines()
    assert [line.split('|')[0] for line in lines] == [f'Work: {10 * tenth:3}%' for tenth in range(11)] + ['Next']


def test_a_terminal_gets_a_bar_that_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(Terminal(), monkeypatch, 1000)
    # tqdm pads with spaces to erase a longer bar.
    assert text.count('\r') > 400 and text.replace(' ', '').endswith(']\nNext\n') and text.count('\n') == 2
