"""A run that is killed or runs out of disk space leaves only complete files."""

import errno
import os
import stat
from pathlib import Path

import mmengine.fileio
import numpy as np
import pytest
import torch
from conftest import on_a_full_disk
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from slab_det.common.errors import CheckpointError
from slab_det.runtime import find_latest_checkpoint, read_checkpoint


class TinyModel(BaseModel):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, mode='tensor'):
        return {'loss': self.linear(torch.stack(x)).square().mean()} if mode == 'loss' else [x]


class TinyData(Dataset):
    metainfo = {'classes': ('cat', 'dog'), 'weights': np.ones(2, np.float32)}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {'x': torch.full((2,), float(index))}


class Improving(BaseMetric):
    """Returns numpy scalars, as COCO metrics do."""

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        self.value = getattr(self, 'value', 0.0) + 0.1
        return {'mAP': np.float64(self.value), 'count': np.int64(len(results))}


def run(work_dir: Path, max_epochs: int, max_keep_ckpts: int = 1, **changes) -> Runner:
    def loader(shuffle: bool) -> dict:
        sampler = dict(type='DefaultSampler', shuffle=shuffle)
        return dict(batch_size=2, num_workers=0, sampler=sampler, dataset=TinyData())

    torch.manual_seed(0)
    keep = dict(interval=1, save_best='mAP', rule='greater', max_keep_ckpts=max_keep_ckpts)
    settings = dict(
        model=TinyModel(),
        work_dir=str(work_dir),
        train_dataloader=loader(True),
        val_dataloader=loader(False),
        val_evaluator=[Improving()],
        val_cfg={},
        train_cfg=dict(by_epoch=True, max_epochs=max_epochs),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.1)),
        param_scheduler=[dict(type='MultiStepLR', milestones=[2])],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', **keep)),
        custom_hooks=[dict(type='EMAHook')],
        randomness=dict(seed=0),
        experiment_name=f'{work_dir.name}-{max_epochs}-{np.random.rand()}',
        default_scope='mmengine',
    )
    runner = Runner(**{**settings, **changes})
    runner.train()
    return runner


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob('*.pth'))


def test_the_allow_list_covers_all_that_a_runner_saves(tmp_path):
    """Including the bound method in OneCycleLR."""
    run(tmp_path, 1, param_scheduler=[dict(type='OneCycleLR', eta_max=0.1, total_steps=16, by_epoch=False)])
    for name in names(tmp_path):
        assert read_checkpoint(tmp_path / name)['meta']['dataset_meta']['classes'] == ('cat', 'dog')


def test_previous_checkpoints_are_removed(tmp_path):
    run(tmp_path, 2)
    assert names(tmp_path) == ['best_mAP_epoch_2.pth', 'epoch_2.pth']
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / 'epoch_2.pth')
    # A resumed run also removes the checkpoint it started from.
    run(tmp_path, 3, resume=True)
    assert names(tmp_path) == ['best_mAP_epoch_2.pth', 'epoch_3.pth']


@pytest.mark.parametrize('interruption', [OSError(errno.ENOSPC, 'No space left'), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    ('during', 'left'),
    [
        ('epoch_2.pth', ['best_mAP_epoch_1.pth', 'epoch_1.pth']),
        ('best_mAP_epoch_2.pth', ['best_mAP_epoch_1.pth', 'epoch_2.pth']),
    ],
)
def test_an_interrupted_run_keeps_whole_files(tmp_path, monkeypatch, during, left, interruption):
    sync = os.fsync

    def sync_until_interrupted(descriptor):
        # The temporary file exists now, and the final name does not.
        writes = os.readlink(f'/proc/self/fd/{descriptor}').startswith(str(tmp_path / f'.{during}.'))
        if writes:
            raise interruption
        sync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(type(interruption)):
        patch.setattr(os, 'fsync', sync_until_interrupted)
        run(tmp_path, 2)
    assert names(tmp_path) == left
    assert not list(tmp_path.glob('.*')), 'nothing half written stays'
    assert (tmp_path / 'last_checkpoint').read_text().endswith(('epoch_1.pth', 'epoch_2.pth'))
    assert read_checkpoint(find_latest_checkpoint(tmp_path))['meta']['epoch'] in (1, 2)


def test_files_have_the_usual_permissions_and_links_stay(tmp_path):
    target, link = tmp_path / 'new' / 'text', tmp_path / 'link'
    umask = os.umask(0o027)
    try:
        mmengine.fileio.put_text('a', target)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    link.symlink_to(target)
    mmengine.fileio.put_text('ä', link)
    assert link.is_symlink() and target.read_text(encoding='utf-8') == 'ä'


def test_full_disk_error_names_the_file_and_keeps_its_old_content(tmp_path):
    file = tmp_path / 'model.pth'
    file.write_text('before')
    assert on_a_full_disk(lambda: mmengine.fileio.put(b'a' * 5000, file)) == f'{file}: File too large'
    assert file.read_text() == 'before' and os.listdir(tmp_path) == ['model.pth']


def test_file_in_the_place_of_a_folder_is_named(tmp_path):
    file = tmp_path / 'notes'
    file.write_text('before')
    with pytest.raises(OSError, match='notes') as raised:
        mmengine.fileio.put(b'a', file / 'model.pth')
    assert Path(raised.value.filename) == file


def test_latest_checkpoint_is_found_if_last_checkpoint_is_stale(tmp_path):
    assert find_latest_checkpoint(tmp_path) is None
    marker, newest, last = tmp_path / 'last_checkpoint', tmp_path / 'iter_9.pth', tmp_path / 'iter_10.pth'
    marker.write_text('iter_8.pth')
    with pytest.raises(CheckpointError, match='iter_8.pth.*remove last_checkpoint'):
        find_latest_checkpoint(tmp_path)
    for i, name in enumerate((last.name, newest.name, 'best_mAP_iter_9.pth', 'fused.pth')):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (i, i))
    # Names a removed checkpoint; is empty, as plain mmengine can leave it; names a folder that was moved.
    for text, expected in (('iter_8.pth', newest), ('', newest), ('somewhere/else/iter_10.pth\n', last)):
        marker.write_text(text)
        assert find_latest_checkpoint(tmp_path) == str(expected), text
    # The run was killed before it wrote last_checkpoint.
    marker.unlink()
    assert find_latest_checkpoint(tmp_path) == str(newest)
    # last_checkpoint of a copied folder names a checkpoint in the original folder.
    original = tmp_path / 'original' / 'iter_10.pth'
    original.parent.mkdir()
    original.touch()
    marker.write_text(str(original))
    assert find_latest_checkpoint(tmp_path) == str(last)
