"""A work directory that a run can be killed in, or run out of disk space in, at any moment."""

import errno
import os
import stat
from pathlib import Path

import mmengine.fileio
import numpy as np
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.optim import OneCycleParamScheduler
from mmengine.runner import Runner, save_checkpoint
from torch import nn
from torch.utils.data import Dataset

from slab_det.runtime import find_latest_checkpoint, read_checkpoint
from slab_det.runtime.errors import CheckpointError
from slab_det.runtime.run_folder import AtomicLocalBackend, remove_unfinished_files


class TinyModel(BaseModel):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, mode='tensor'):
        return {'loss': self.linear(torch.stack(x)).square().mean()} if mode == 'loss' else [x]


class TinyData(Dataset):
    metainfo = {'classes': ('cat', 'dog'), 'palette': [(1, 2, 3), (4, 5, 6)], 'weights': np.ones(2, np.float32)}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {'x': torch.full((2,), float(index))}


class NumpyMetric(BaseMetric):
    """Returns numpy scalars, as COCO metrics do."""

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return {'mAP': np.float64(0.5), 'count': np.int64(len(results))}


def loader(shuffle):
    return {
        'batch_size': 2,
        'num_workers': 0,
        'sampler': {'type': 'DefaultSampler', 'shuffle': shuffle},
        'dataset': TinyData(),
    }


def tiny_runner(work_dir, max_epochs=1, **changes):
    torch.manual_seed(0)
    settings = {
        'model': TinyModel(),
        'work_dir': str(work_dir),
        'train_dataloader': loader(True),
        'val_dataloader': loader(False),
        'val_evaluator': [NumpyMetric()],
        'val_cfg': {},
        'train_cfg': {'by_epoch': True, 'max_epochs': max_epochs},
        'optim_wrapper': {
            'type': 'OptimWrapper',
            'optimizer': {'type': 'AdamW', 'lr': 0.1},
            'accumulative_counts': 2,
            'clip_grad': {'max_norm': 1},
        },
        'param_scheduler': [
            {'type': 'LinearLR', 'start_factor': 0.1, 'by_epoch': False, 'end': 4},
            {'type': 'MultiStepLR', 'milestones': [2]},
        ],
        'default_hooks': {
            'checkpoint': {'type': 'CheckpointHook', 'interval': 1, 'save_best': 'mAP', 'rule': 'greater'}
        },
        'custom_hooks': [{'type': 'EMAHook'}],
        'randomness': {'seed': 0},
        'experiment_name': f'{work_dir.name}-{max_epochs}-{np.random.rand()}',
        'default_scope': 'mmengine',
    }
    return Runner(**{**settings, **changes})


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


def test_a_real_run_resumes_exactly(tmp_path):
    """Also: everything that mmengine's Runner saves is on the allow-list."""
    whole = tiny_runner(tmp_path / 'whole', 4).train()
    resumed = tiny_runner(tmp_path / 'resumed', 4, load_from=str(tmp_path / 'whole' / 'epoch_2.pth'), resume=True)
    assert torch.equal(resumed.train().linear.weight, whole.linear.weight)
    # Of epoch 1, which came with the checkpoint, and of 3 and 4: mmengine saves before it validates.
    assert resumed.message_hub.get_scalar('val/mAP').data[0].tolist() == [0.5] * 3
    for file in [*tmp_path.glob('*/epoch_*.pth'), *tmp_path.glob('*/best_*.pth')]:
        assert read_checkpoint(file)['meta']['dataset_meta']['classes'] == ('cat', 'dog')


def test_one_cycle_schedule_is_loaded(tmp_path):
    """Its state holds a method."""
    schedule = [{'type': 'OneCycleLR', 'eta_max': 0.1, 'total_steps': 16, 'by_epoch': False}]
    tiny_runner(tmp_path, param_scheduler=schedule).train()
    path = tmp_path / 'epoch_1.pth'
    state = read_checkpoint(path)['param_schedulers'][0]
    assert state == torch.load(path, weights_only=False)['param_schedulers'][0]
    assert state['anneal_func'] is OneCycleParamScheduler._annealing_cos


@pytest.mark.parametrize('failing', ['fsync', 'replace'])
def test_interrupted_save_keeps_the_previous_file(tmp_path, monkeypatch, failing):
    path = tmp_path / 'last.pth'
    save_checkpoint({'epoch': 1}, str(path))

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, failing, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint({'epoch': 2}, str(path))
    assert torch.load(path) == {'epoch': 1}
    assert os.listdir(tmp_path) == ['last.pth']


def test_files_have_the_usual_permissions(tmp_path):
    umask = os.umask(0o027)
    try:
        mmengine.fileio.put_text('ä', tmp_path / 'new' / 'text')
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / 'new' / 'text').stat().st_mode) == 0o640
    assert (tmp_path / 'new' / 'text').read_text(encoding='utf-8') == 'ä'


def test_link_keeps_pointing_to_its_file(tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    link, target = tmp_path / 'link', tmp_path / 'elsewhere' / 'file'
    link.symlink_to(target)
    AtomicLocalBackend().put(b'new', link)
    assert link.is_symlink() and target.read_bytes() == b'new'


def test_pipe_is_written_and_stays(tmp_path):
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    AtomicLocalBackend().put(b'content', pipe)
    assert os.read(reader, 10) == b'content' and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


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
    ],
)
def test_a_full_disk_costs_no_checkpoint(tmp_path, monkeypatch, full_at, left):
    replace = os.replace

    def replace_until_full(source, destination):
        if Path(destination).name == full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', replace_until_full)
        with pytest.raises(OSError, match='No space left'):
            run(tmp_path)
    assert names(tmp_path) == left
    assert not list(tmp_path.glob('.*')), 'nothing half written stays'
    assert read_checkpoint(find_latest_checkpoint(str(tmp_path)))['meta']['epoch'] in (1, 2)


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    (tmp_path / '.epoch_1.pth.0123abcd.tmp').write_bytes(b'half')
    (tmp_path / '.mine.tmp').write_text('a note')
    remove_unfinished_files(tmp_path)
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


def test_a_name_without_any_checkpoint_is_an_error(tmp_path):
    (tmp_path / 'last_checkpoint').write_text('iter_8.pth')
    with pytest.raises(CheckpointError, match='names iter_8.pth, which is not there.*remove last_checkpoint'):
        find_latest_checkpoint(str(tmp_path))


def test_a_copied_folder_resumes_from_its_own_checkpoint(tmp_path):
    original, copied = tmp_path / 'a', tmp_path / 'b'
    for folder in (original, copied):
        folder.mkdir()
        (folder / 'iter_4.pth').touch()
        (folder / 'last_checkpoint').write_text(str(original / 'iter_4.pth'))
    assert find_latest_checkpoint(str(copied)) == str(copied / 'iter_4.pth')
