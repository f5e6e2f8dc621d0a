"""A work directory that a run can be killed in, or run out of disk space in, at any moment."""

import errno
import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.runner import Runner, find_latest_checkpoint
from test_engine import tiny_runner

from slab_det.runtime.engine import read_checkpoint
from slab_det.runtime.errors import CheckpointError


class Improving(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        self.value = getattr(self, 'value', 0.0) + 0.1
        return {'mAP': self.value}


def run(work_dir: Path, max_epochs: int = 2, **changes) -> Runner:
    runner = tiny_runner(
        work_dir,
        max_epochs,
        val_evaluator=[Improving()],
        **changes,
        default_hooks={
            'checkpoint': {
                'type': 'CheckpointHook',
                'interval': 1,
                'max_keep_ckpts': 1,
                'save_best': 'mAP',
                'rule': 'greater',
            }
        },
    )
    runner.train()
    return runner


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob('*.pth'))


def test_the_checkpoints_before_are_removed_when_the_new_ones_are_there(tmp_path):
    run(tmp_path)
    assert names(tmp_path) == ['best_mAP_epoch_2.pth', 'epoch_2.pth']
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / 'epoch_2.pth')
    # A resumed run goes on removing.
    run(tmp_path, 3, resume=True)
    assert names(tmp_path) == ['best_mAP_epoch_2.pth', 'epoch_3.pth']


@pytest.mark.parametrize(
    ('full_at', 'left'),
    [
        ('epoch_2.pth', ['best_mAP_epoch_1.pth', 'epoch_1.pth']),
        ('best_mAP_epoch_2.pth', ['best_mAP_epoch_1.pth', 'epoch_2.pth']),
        ('last_checkpoint', ['best_mAP_epoch_1.pth', 'epoch_1.pth', 'epoch_2.pth']),
    ],
)
def test_a_full_disk_costs_no_checkpoint(tmp_path, monkeypatch, full_at, left):
    replace = os.replace

    def replace_until_full(source, destination):
        # last_checkpoint is written after each epoch.
        if Path(destination).name == full_at and (full_at.endswith('2.pth') or (tmp_path / 'epoch_2.pth').exists()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', replace_until_full)
        with pytest.raises(OSError, match='No space left'):
            run(tmp_path)
    assert names(tmp_path) == left
    assert not list(tmp_path.glob('.*')), 'nothing half written stays'
    assert read_checkpoint(find_latest_checkpoint(str(tmp_path)))['meta']['epoch'] in (1, 2)


def test_what_a_killed_run_was_writing_is_removed_by_the_next(tmp_path):
    (tmp_path / '.epoch_1.pth.0123abcd.tmp').write_bytes(b'half')
    (tmp_path / '.mine.tmp').write_text('a note')
    run(tmp_path, 1)
    assert [path.name for path in tmp_path.glob('.*')] == ['.mine.tmp']


def test_the_latest_checkpoint_is_found_whatever_became_of_its_name(tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    assert find_latest_checkpoint(str(folder)) is None
    for i, name in enumerate(('iter_10.pth', 'iter_9.pth', 'best_mAP_iter_9.pth', 'fused.pth')):
        torch.save({}, folder / name)
        os.utime(folder / name, (i, i))
    marker = folder / 'last_checkpoint'
    # Killed before it was written; left empty by mmengine alone; naming what is gone.
    assert find_latest_checkpoint(str(folder)) == str(folder / 'iter_9.pth')
    for text in ('', 'iter_8.pth'):
        marker.write_text(text)
        assert find_latest_checkpoint(str(folder)) == str(folder / 'iter_9.pth')
    # Of a folder that was moved, or of another current directory.
    marker.write_text('somewhere/else/iter_10.pth\n')
    assert find_latest_checkpoint(str(folder)) == str(folder / 'iter_10.pth')
    marker.write_text('s3://bucket/iter_3.pth')
    assert find_latest_checkpoint(str(folder)) == 's3://bucket/iter_3.pth'


def test_a_name_without_any_checkpoint_is_an_error(tmp_path):
    (tmp_path / 'last_checkpoint').write_text('iter_8.pth')
    with pytest.raises(CheckpointError, match='names iter_8.pth, which is not there.*remove last_checkpoint'):
        find_latest_checkpoint(str(tmp_path))


def test_a_config_is_dumped_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / 'config.py'
    Config({'a': 1}).dump(path)
    assert Config.fromfile(path).a == 1

    def fail(source, destination):
        raise OSError(errno.ENOSPC, 'full')

    monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(OSError, match='full'):
        Config({'a': 2}).dump(path)
    assert Config.fromfile(path).a == 1 and [file.name for file in tmp_path.iterdir()] == ['config.py']
    assert Config({'a': 2}).dump() == 'a = 2\n'


def test_a_copied_folder_resumes_from_its_own_checkpoint(tmp_path):
    original, copied = tmp_path / 'a', tmp_path / 'b'
    for folder in (original, copied):
        folder.mkdir()
        (folder / 'iter_4.pth').touch()
        (folder / 'last_checkpoint').write_text(str(original / 'iter_4.pth'))
    assert find_latest_checkpoint(str(copied)) == str(copied / 'iter_4.pth')
