"""Files are written whole, by one writer at a time."""

import errno
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from mmengine.logging import MMLogger

from slab_det.common.files import check_writable, locked, whole_file


def test_check_writable_refuses_unwritable_paths(tmp_path):
    (tmp_path / 'notes.txt').write_text('before')
    check_writable(None, tmp_path / 'notes.txt', tmp_path / 'new' / 'model.pth')
    assert os.listdir(tmp_path) == ['notes.txt']
    for file, error in ((tmp_path, IsADirectoryError), (tmp_path / 'notes.txt' / 'model.pth', NotADirectoryError)):
        with pytest.raises(error) as caught:
            check_writable(file)
        assert caught.value.filename == str(file)


def in_another_process(function):
    """Calls ``function`` in a process with this one's modules, and waits for it."""
    process = multiprocessing.get_context('fork').Process(target=function)
    process.start()
    process.join()
    assert process.exitcode == 0


def write(file: Path, content: bytes) -> None:
    with whole_file(file) as name:
        name.write_bytes(content)


def test_two_processes_may_write_one_file_at_once(tmp_path):
    file = tmp_path / 'iter_2.pth'
    with whole_file(file) as name:
        name.write_bytes(b'a' * 100)
        in_another_process(lambda: write(file, b'b' * 50))
        assert file.read_bytes() == b'b' * 50
    assert file.read_bytes() == b'a' * 100 and os.listdir(tmp_path) == ['iter_2.pth']


def test_two_threads_may_write_one_file_at_once(tmp_path):
    path, barrier = tmp_path / 'file.txt', Barrier(2, timeout=30)

    def write(text: str) -> None:
        with whole_file(path) as name:
            name.write_text(text)
            barrier.wait()
            assert name.read_text() == text

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(write, ('a' * 9, 'b' * 5))]
    assert path.read_text() in ('a' * 9, 'b' * 5) and [*tmp_path.iterdir()] == [path]


def test_a_lock_may_be_refused_instead_of_waited_for(tmp_path):
    path = tmp_path / 'folder'
    with locked(path, wait=False), pytest.raises(BlockingIOError), locked(path, wait=False):
        pass
    with locked(path, wait=False):
        assert not path.exists()


def test_the_leftover_of_a_killed_process_is_removed_and_that_of_a_running_one_stays(tmp_path):
    file = tmp_path / 'a[1].pth'

    def be_killed():
        with pytest.raises(KeyboardInterrupt), whole_file(file) as name:
            name.write_bytes(b'half')
            os._exit(0)

    in_another_process(be_killed)
    assert len(os.listdir(tmp_path)) == 1
    with whole_file(file) as name:
        name.write_bytes(b'whole')
        (found,) = os.listdir(tmp_path)
        assert found == name.name
        in_another_process(lambda: write(file, b'other'))
        assert name.read_bytes() == b'whole'


def test_a_locked_file_is_changed_by_one_process_at_a_time(tmp_path):
    count = tmp_path / 'new' / 'count'

    def add(times):
        for _ in range(times):
            with locked(count):
                value = int(count.read_text()) if count.exists() else 0
                write(count, str(value + 1).encode())

    other = multiprocessing.get_context('fork').Process(target=add, args=(60,))
    other.start()
    add(60)
    other.join()
    assert (other.exitcode, count.read_text(), os.listdir(count.parent)) == (0, '120', ['count'])


def test_without_locks_a_file_is_changed_all_the_same_and_a_warning_says_so(tmp_path, monkeypatch):
    """As on some network file systems."""
    monkeypatch.setattr('fcntl.flock', Mock(side_effect=OSError(errno.ENOLCK, 'No locks available')))
    warnings = []
    monkeypatch.setattr(MMLogger, 'get_current_instance', lambda: SimpleNamespace(warning=warnings.append))
    with locked(tmp_path / 'report.json'):
        pass
    assert len(warnings) == 1 and 'report.json cannot be locked' in warnings[0] and not os.listdir(tmp_path)
