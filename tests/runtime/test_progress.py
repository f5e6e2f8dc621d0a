"""Progress of long work, on a terminal and in a file."""

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


def test_a_file_gets_a_line_at_each_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = show(io.StringIO(), monkeypatch, 1000).splitlines()
    assert [line.split('|')[0] for line in lines] == [f'Work: {10 * tenth:3}%' for tenth in range(11)] + ['Next']


def test_a_terminal_gets_a_bar_that_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(Terminal(), monkeypatch, 1000)
    # Spaces cover the end of a longer bar before.
    assert text.count('\r') > 400 and text.replace(' ', '').endswith(']\nNext\n') and text.count('\n') == 2
