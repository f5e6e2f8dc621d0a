"""Records of what was measured: where, by which code, and in files that any program reads."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import slab_det
from slab_det.common import record
from slab_det.common.record import (
    NOT_RECORDED,
    SCHEMA,
    Record,
    describe_commit,
    describe_environment,
    format_table,
    read_record,
    to_plain,
    write_record,
)


@dataclass(frozen=True)
class Times(Record):
    median_ms: float
    quartiles: tuple[float, float] = (0.0, 0.0)


def test_a_measurement_says_where_and_by_which_code_it_was_made() -> None:
    found = describe_environment()
    assert all(found[key] for key in ('commit', 'device', 'cpu', 'instructions', 'platform')), found
    assert found['device'] == found['cpu'] and found['threads'] == torch.get_num_threads()
    expected = dict(torch=torch.__version__, slab_det=slab_det.__version__)
    assert expected.items() <= found['versions'].items(), found
    assert to_plain(found) == found


@pytest.mark.skipif(shutil.which('git') is None, reason='no git')
def test_commit_is_that_of_the_tree_and_says_whether_a_file_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, 'ROOT', tmp_path)
    (tmp_path / 'file').write_text('first')
    author = ('-c', 'user.name=a', '-c', 'user.email=a@b')
    for command in (('init', '-q'), ('add', 'file'), (*author, 'commit', '-q', '-m', 'first')):
        subprocess.run(('git', *command), cwd=tmp_path, check=True)
    assert re.fullmatch('[0-9a-f]{7,}', describe_commit())
    (tmp_path / 'file').write_text('second')
    assert re.fullmatch('[0-9a-f]{7,}-dirty', describe_commit())
    # An installed package lies in the checkout of whoever uses it.
    (tmp_path / 'site-packages').mkdir()
    monkeypatch.setattr(record, 'ROOT', tmp_path / 'site-packages')
    assert describe_commit() == NOT_RECORDED


def test_commit_is_named_where_there_is_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring machines may have the files alone."""
    monkeypatch.setattr(record, 'ROOT', tmp_path)
    monkeypatch.delenv('SLAB_DET_COMMIT', raising=False)
    assert describe_commit() == NOT_RECORDED
    monkeypatch.setenv('SLAB_DET_COMMIT', 'abc1234')
    assert describe_commit() == 'abc1234'


def test_a_record_is_read_as_it_was_written_and_an_error_leaves_the_older_one(tmp_path: Path) -> None:
    path, times = tmp_path / 'new' / 'times.json', Times(2.5, (2.0, 3.0))
    write_record(path, dict(times.to_dict(), name='a'))
    found = read_record(path)
    assert found == dict(median_ms=2.5, quartiles=[2.0, 3.0], name='a', schema=SCHEMA)
    assert Times.from_dict(found).median_ms == 2.5, 'other values are left out'
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match='JSON'):
            write_record(path, Times(value).to_dict())
    assert read_record(path) == found and [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize('content', ['', '{}', '[]', json.dumps(dict(schema=SCHEMA + 1))])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / 'times.json').write_text(content)
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_record(tmp_path / 'times.json')


def test_a_table_has_one_line_for_each_row() -> None:
    assert format_table(('', 'ms'), [('a', '1'), ('b', '2')]) == '| | ms |\n|---|---:|\n| a | 1 |\n| b | 2 |'
