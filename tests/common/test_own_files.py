"""A command takes a folder only if it is new, empty or its own, and replaces and removes only what it wrote there."""

from __future__ import annotations

from pathlib import Path

import pytest

from slab_det.common.errors import SlabDetError
from slab_det.common.own_files import OwnFiles, check_own

MARKER = '.slab_det_optimize'


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob('*') if path.is_file()}


@pytest.mark.parametrize('name', ['README.md', 'work/state.json', 'optimize.json', '.git/config', 'config.py'])
def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('mine')
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, Path('.')):
        with pytest.raises(SlabDetError, match='did not write; give a new folder'):
            check_own(folder, 'optimize')
    assert contents(tmp_path) == {name: 'mine'}


def test_new_and_empty_folders_are_taken_and_known_again(tmp_path):
    for folder in (tmp_path / 'new', tmp_path / 'empty'):
        if folder.name == 'empty':
            folder.mkdir()
        with OwnFiles(folder, 'optimize').write('README.md') as path:
            path.write_text('one')
        (folder / 'notes.txt').write_text('mine')
        files = OwnFiles(folder, 'optimize')
        with files.write('README.md') as path:
            path.write_text('two')
        assert contents(folder) == {'README.md': 'two', 'notes.txt': 'mine', MARKER: 'README.md\n'}
        files.remove_others(set())
        assert contents(folder).keys() == {'notes.txt', MARKER}


def test_a_file_that_somebody_put_into_the_folder_stays(tmp_path):
    files = OwnFiles(tmp_path, 'optimize')
    (tmp_path / 'README.md').write_text('mine')
    (tmp_path / 'source').mkdir()
    (tmp_path / 'source' / 'README.md').write_text('other')
    for write in (lambda: files.write('README.md').__enter__(), lambda: files.copy(tmp_path / 'source' / 'README.md')):
        with pytest.raises(SlabDetError, match=r'README\.md is not a file that slab-det optimize wrote: move it away'):
            write()
    files.remove_others(set())
    OwnFiles(tmp_path, 'optimize').remove_others(set())
    assert (tmp_path / 'README.md').read_text() == 'mine'


def test_a_file_is_listed_before_it_is_written(tmp_path):
    with pytest.raises(KeyboardInterrupt), OwnFiles(tmp_path, 'optimize').write('a.pth') as path:
        assert 'a.pth' in (tmp_path / MARKER).read_text()
        path.write_text('half')
        raise KeyboardInterrupt
    (tmp_path / 'a.pth').write_text('what a killed program left')
    OwnFiles(tmp_path, 'optimize').remove_others(set())
    assert not (tmp_path / 'a.pth').exists()


def test_a_file_and_no_folder_is_refused(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(SlabDetError, match='is a file; give a new folder'):
        check_own(tmp_path / 'file', 'optimize')


def test_a_copy_is_made_again_only_where_it_changed(tmp_path):
    files, source = OwnFiles(tmp_path / 'out', 'optimize'), tmp_path / 'a.pth'
    source.write_text('one')
    files.copy(source)
    before = (tmp_path / 'out' / 'a.pth').stat()
    files.copy(source)
    assert (tmp_path / 'out' / 'a.pth').stat().st_ctime_ns == before.st_ctime_ns
    source.unlink()
    source.write_text('other')
    files.copy(source)
    assert (tmp_path / 'out' / 'a.pth').read_text() == 'other'
