"""A work directory that a run can be killed in, or run out of disk space in, at any moment."""

import errno
import multiprocessing
import os
import re
import stat
import time
from contextlib import nullcontext
from pathlib import Path

import mmengine.fileio
import numpy as np
import pytest
import torch
from conftest import on_a_full_disk
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.optim import OneCycleParamScheduler
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from slab_det.runtime import find_latest_checkpoint, read_checkpoint
from slab_det.runtime.errors import CheckpointError, SlabDetError
from slab_det.runtime.run_folder import check_writable, lock_run_folder, remove_unfinished_files, whole_files


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
        sampler = {'type': 'DefaultSampler', 'shuffle': shuffle}
        return {'batch_size': 2, 'num_workers': 0, 'sampler': sampler, 'dataset': TinyData()}

    torch.manual_seed(0)
    checkpoint = {
        'type': 'CheckpointHook',
        'interval': 1,
        'save_best': 'mAP',
        'rule': 'greater',
        'max_keep_ckpts': max_keep_ckpts,
    }
    settings = {
        'model': TinyModel(),
        'work_dir': str(work_dir),
        'train_dataloader': loader(True),
        'val_dataloader': loader(False),
        'val_evaluator': [Improving()],
        'val_cfg': {},
        'train_cfg': {'by_epoch': True, 'max_epochs': max_epochs},
        'optim_wrapper': {'type': 'OptimWrapper', 'optimizer': {'type': 'AdamW', 'lr': 0.1}},
        'param_scheduler': [{'type': 'MultiStepLR', 'milestones': [2]}],
        'default_hooks': {'checkpoint': checkpoint},
        'custom_hooks': [{'type': 'EMAHook'}],
        'randomness': {'seed': 0},
        'experiment_name': f'{work_dir.name}-{max_epochs}-{np.random.rand()}',
        'default_scope': 'mmengine',
    }
    runner = Runner(**{**settings, **changes})
    runner.train()
    return runner


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob('*.pth'))


def test_a_real_run_resumes_exactly(tmp_path):
    """Also: everything that mmengine's Runner saves is on the allow-list."""
    whole = run(tmp_path / 'whole', 4, -1)
    resumed = run(tmp_path / 'resumed', 4, -1, load_from=str(tmp_path / 'whole' / 'epoch_2.pth'), resume=True)
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)
    for file in tmp_path.glob('*/*.pth'):
        assert read_checkpoint(file)['meta']['dataset_meta']['classes'] == ('cat', 'dog')


def test_one_cycle_schedule_is_loaded(tmp_path):
    """Its state holds a method."""
    run(tmp_path, 1, param_scheduler=[{'type': 'OneCycleLR', 'eta_max': 0.1, 'total_steps': 16, 'by_epoch': False}])
    path = tmp_path / 'epoch_1.pth'
    state = read_checkpoint(path)['param_schedulers'][0]
    assert state == torch.load(path, weights_only=False)['param_schedulers'][0]
    assert state['anneal_func'] is OneCycleParamScheduler._annealing_cos


def test_the_checkpoints_before_are_removed_when_the_new_ones_are_there(tmp_path):
    run(tmp_path, 2)
    assert names(tmp_path) == ['best_mAP_epoch_2.pth', 'epoch_2.pth']
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / 'epoch_2.pth')
    # A resumed run goes on removing.
    run(tmp_path, 3, resume=True)
    assert names(tmp_path) == ['best_mAP_epoch_2.pth', 'epoch_3.pth']


@pytest.mark.parametrize('interruption', [OSError(errno.ENOSPC, 'No space left'), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    ('during', 'left'),
    [
        ('epoch_2.pth', ['best_mAP_epoch_1.pth', 'epoch_1.pth']),
        ('best_mAP_epoch_2.pth', ['best_mAP_epoch_1.pth', 'epoch_2.pth']),
        ('last_checkpoint', ['best_mAP_epoch_1.pth', 'epoch_1.pth', 'epoch_2.pth']),
    ],
)
def test_an_interrupted_run_keeps_whole_files(tmp_path, monkeypatch, during, left, interruption):
    sync = os.fsync

    def sync_until_interrupted(descriptor):
        # Half of the file is on the disk by now. In the first epoch all goes well.
        writes = os.readlink(f'/proc/self/fd/{descriptor}').startswith(str(tmp_path / f'.{during}.'))
        if writes and ('epoch_2' in during or (tmp_path / 'epoch_2.pth').exists()):
            raise interruption
        sync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(type(interruption)):
        patch.setattr(os, 'fsync', sync_until_interrupted)
        run(tmp_path, 2)
    assert names(tmp_path) == left
    assert not list(tmp_path.glob('.*')), 'nothing half written stays'
    assert (tmp_path / 'last_checkpoint').read_text().endswith(('epoch_1.pth', 'epoch_2.pth'))
    assert read_checkpoint(find_latest_checkpoint(tmp_path))['meta']['epoch'] in (1, 2)


def test_an_interrupted_config_keeps_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / 'config.py'
    Config({'a': 1}).dump(path)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, 'replace', interrupt)
        Config({'a': 2}).dump(path)
    assert Config.fromfile(path).a == 1 and os.listdir(tmp_path) == ['config.py']


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


def test_files_appear_together_in_their_order_or_not_at_all(tmp_path, monkeypatch):
    files = [tmp_path / 'new' / name for name in ('model.pth', 'config.py')]
    for text in ('before', 'broken', 'after'):
        context = pytest.raises(ValueError, match='a check') if text == 'broken' else nullcontext()
        with context, whole_files(*files) as names:
            for name in names:
                name.write_text(text)
            assert [file.exists() and file.read_text() for file in files] in ([False] * 2, ['before'] * 2)
            if text == 'broken':
                raise ValueError('a check')
    replaced, replace = [], os.replace
    monkeypatch.setattr(os, 'replace', lambda name, path: replaced.append(path.name) or replace(name, path))
    with whole_files(*files) as names:
        for name in names:
            name.write_text('last')
    assert replaced == ['model.pth', 'config.py'] and sorted(os.listdir(tmp_path / 'new')) == sorted(replaced)


def test_a_full_disk_is_named_and_leaves_the_files_before(tmp_path):
    files = [tmp_path / name for name in ('model.pth', 'config.py')]
    for file in files:
        file.write_text('before')

    def write() -> None:
        with whole_files(*files) as names:
            for name, size in zip(names, (10, 5000), strict=True):
                name.write_bytes(b'a' * size)

    message = on_a_full_disk(write)
    assert re.fullmatch(r'\S+/config.py: File too large; .*run the command again: a file .* is whole', message), message
    assert [file.read_text() for file in files] == ['before'] * 2 and len(os.listdir(tmp_path)) == 2


def test_what_cannot_be_written_is_known_before_the_work(tmp_path):
    (tmp_path / 'notes.txt').write_text('before')
    check_writable(None, tmp_path / 'notes.txt', tmp_path / 'new' / 'model.pth', '/dev/null')
    assert os.listdir(tmp_path) == ['notes.txt']
    for file, error in ((tmp_path, IsADirectoryError), (tmp_path / 'notes.txt' / 'model.pth', NotADirectoryError)):
        with pytest.raises(error) as caught:
            check_writable(file)
        assert caught.value.filename == str(file)


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    # As root, --out /dev/null would leave the machine without one.
    device = tmp_path / 'pipe'
    os.mkfifo(device)
    reader = os.open(device, os.O_RDWR | os.O_NONBLOCK)
    mmengine.fileio.put_text('a', device)
    assert os.read(reader, 2) == b'a' and device.is_fifo()
    os.close(reader)


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    (tmp_path / '.epoch_1.pth.0123abcd.tmp').write_bytes(b'half')
    (tmp_path / '.mine.tmp').write_text('a note')
    remove_unfinished_files(tmp_path)
    assert os.listdir(tmp_path) == ['.mine.tmp']


def test_the_latest_checkpoint_is_found_whatever_became_of_its_name(tmp_path):
    assert find_latest_checkpoint(tmp_path) is None
    marker, newest, last = tmp_path / 'last_checkpoint', tmp_path / 'iter_9.pth', tmp_path / 'iter_10.pth'
    marker.write_text('iter_8.pth')
    with pytest.raises(CheckpointError, match='names iter_8.pth, which is not there.*remove last_checkpoint'):
        find_latest_checkpoint(tmp_path)
    for i, name in enumerate((last.name, newest.name, 'best_mAP_iter_9.pth', 'fused.pth')):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (i, i))
    # Naming what is gone; left empty by mmengine alone; of a folder that was moved, or of another current directory.
    for text, expected in (('iter_8.pth', newest), ('', newest), ('somewhere/else/iter_10.pth\n', last)):
        marker.write_text(text)
        assert find_latest_checkpoint(tmp_path) == str(expected), text
    # Killed before it was written.
    marker.unlink()
    assert find_latest_checkpoint(tmp_path) == str(newest)
    # Of a copied folder, the original may have gone on.
    original = tmp_path / 'original' / 'iter_10.pth'
    original.parent.mkdir()
    original.touch()
    marker.write_text(str(original))
    assert find_latest_checkpoint(tmp_path) == str(last)


def _keep(folder, is_locked):
    lock_run_folder(folder)
    is_locked.set()
    time.sleep(60)


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(tmp_path):
    fork = multiprocessing.get_context('fork')
    is_locked = fork.Event()
    first = fork.Process(target=_keep, args=(tmp_path / 'run', is_locked))
    first.start()
    assert is_locked.wait(30)
    with pytest.raises(SlabDetError, match='run is the folder of a training that is going on.*another --work-dir'):
        lock_run_folder(tmp_path / 'run')
    lock_run_folder(tmp_path / 'another')
    first.kill()
    first.join()
    lock_run_folder(tmp_path / 'run')
