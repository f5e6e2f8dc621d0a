"""How mmengine writes and reads checkpoint files once slab_det is imported."""

import io
import os
import pickle
import stat

import mmengine.fileio
import numpy as np
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.optim import OneCycleParamScheduler
from mmengine.runner import CheckpointLoader, Runner, save_checkpoint
from torch import nn
from torch.utils.data import Dataset

from slab_det.runtime.engine import AtomicLocalBackend, CheckpointError


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


def test_a_real_run_resumes_exactly(tmp_path):
    """Also: everything that mmengine's Runner saves is on the allow-list."""
    whole = tiny_runner(tmp_path / 'whole', 4).train()
    resumed = tiny_runner(tmp_path / 'resumed', 4, load_from=str(tmp_path / 'whole' / 'epoch_2.pth'), resume=True)
    assert torch.equal(resumed.train().linear.weight, whole.linear.weight)
    # Of epoch 1, which came with the checkpoint, and of 3 and 4: mmengine saves before it validates.
    assert resumed.message_hub.get_scalar('val/mAP').data[0].tolist() == [0.5] * 3
    for file in [*tmp_path.glob('*/epoch_*.pth'), *tmp_path.glob('*/best_*.pth')]:
        assert CheckpointLoader.load_checkpoint(str(file))['meta']['dataset_meta']['classes'] == ('cat', 'dog')


def test_one_cycle_schedule_is_loaded(tmp_path):
    """Its state holds a method."""
    schedule = [{'type': 'OneCycleLR', 'eta_max': 0.1, 'total_steps': 16, 'by_epoch': False}]
    tiny_runner(tmp_path, param_scheduler=schedule).train()
    path = tmp_path / 'epoch_1.pth'
    state = load(path)['param_schedulers'][0]
    assert state == torch.load(path, weights_only=False)['param_schedulers'][0]
    assert state['anneal_func'] is OneCycleParamScheduler._annealing_cos


def test_checkpoints_are_written_to_another_name_first(tmp_path, monkeypatch):
    replaced, replace = [], os.replace

    def note(source, target):
        # All of it is there before the name changes.
        if str(target).endswith('.pth'):
            torch.load(source, weights_only=False)
        replaced.append((os.path.dirname(source), os.fspath(target)))
        replace(source, target)

    monkeypatch.setattr(os, 'replace', note)
    tiny_runner(tmp_path).train()
    files = sorted(str(file) for file in tmp_path.iterdir() if file.is_file())
    assert [os.path.splitext(file)[1] for file in files].count('.pth') == 2 and len(files) == 4, files
    # Also the config and last_checkpoint.
    in_work_dir = {pair for pair in replaced if pair[0] == str(tmp_path)}
    assert sorted(in_work_dir) == [(str(tmp_path), file) for file in files]


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


class RunsCode:
    """What a malicious checkpoint holds."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def load(path):
    return CheckpointLoader.load_checkpoint(str(path), map_location='cpu')


@pytest.mark.parametrize('zipped', [True, False])
def test_unsafe_checkpoint_is_refused_and_does_not_run(tmp_path, zipped):
    path, proof = tmp_path / 'evil.pth', tmp_path / 'it ran'
    torch.save({'state_dict': RunsCode(os.mkdir, str(proof))}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r'evil\.pth: holds posix\.mkdir.*trust'):
        load(path)
    assert not proof.exists()
    # The test is one: loaded without the list, it runs.
    torch.load(path, weights_only=False)
    assert proof.exists()


def test_getattr_reaches_no_further_than_known_methods(tmp_path):
    path = tmp_path / 'evil.pth'
    for call in ((getattr, torch.Tensor, 'numpy'), (getattr, mmengine.logging.HistoryBuffer, '__init__')):
        torch.save({'state_dict': RunsCode(*call)}, path)
        with pytest.raises(CheckpointError, match='builtins.getattr'):
            load(path)


def contents_of(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


WHOLE = contents_of({'state_dict': {'weight': torch.ones(50, 50)}})
LEGACY = contents_of({'state_dict': {'weight': torch.ones(50, 50)}}, _use_new_zipfile_serialization=False)
BROKEN = {
    'empty': b'',
    'half': WHOLE[: len(WHOLE) // 2],
    'without its last byte': WHOLE[:-1],
    'beginning': WHOLE[:10],
    'half legacy': LEGACY[: len(LEGACY) // 2],
    'git lfs pointer': b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n',
    'html': b'<!DOCTYPE html><title>404</title>',
    'json': b'{"state_dict": {}}',
    'plain pickle': pickle.dumps({'state_dict': {}}, protocol=2)[:-4],
}


@pytest.mark.parametrize('kind', BROKEN)
def test_broken_file_is_named_with_what_to_do(tmp_path, kind):
    path = tmp_path / 'broken.pth'
    path.write_bytes(BROKEN[kind])
    expected = r'broken\.pth: cannot be read as a checkpoint \(.+\).*earlier one'
    with pytest.raises(CheckpointError, match=expected) as error:
        load(path)
    assert 'weights_only' not in str(error.value)


def test_missing_file_and_empty_last_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere'):
        load(tmp_path / 'nowhere.pth')
    (tmp_path / 'last_checkpoint').touch()
    with pytest.raises(CheckpointError, match='last_checkpoint'):
        tiny_runner(tmp_path, resume=True).train()


def test_arrays_and_scalars_of_both_numpys_are_loaded(tmp_path):
    path = tmp_path / 'numpy.pth'
    values = {'array': np.arange(3, dtype=np.int16), 'scalar': np.float32(0.5), 'flag': np.bool_(True)}
    torch.save(values, path)
    renamed = tmp_path / 'other.pth'
    # Pickles name the module of the numpy that wrote them; legacy files hold the pickle as it is.
    torch.save(values, renamed, _use_new_zipfile_serialization=False)
    content = renamed.read_bytes()
    ours, other = b'numpy._core.multiarray', b'numpy.core.multiarray'
    ours, other = (ours, other) if ours in content else (other, ours)
    renamed.write_bytes(content.replace(ours, other))
    assert other in renamed.read_bytes()
    for file in (path, renamed):
        loaded = load(file)
        assert loaded['array'].tolist() == [0, 1, 2] and loaded['scalar'] == 0.5 and loaded['flag'], file


def test_allow_list_ends_with_the_loading(tmp_path):
    path = tmp_path / 'numpy.pth'
    torch.save({'array': np.arange(3)}, path)
    load(path)
    with pytest.raises(pickle.UnpicklingError, match='multiarray'):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize('scheme', ['https://example.com/weights.pth', 'torchvision://resnet18'])
def test_downloads_are_read_with_the_allow_list(tmp_path, monkeypatch, scheme):
    torch.save({'state_dict': RunsCode(os.mkdir, str(tmp_path / 'it ran'))}, tmp_path / 'evil.pth')
    monkeypatch.setattr(
        torch.hub, 'download_url_to_file', lambda url, target, *args, **kwargs: os.link(tmp_path / 'evil.pth', target)
    )
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    with pytest.raises(CheckpointError, match=r'posix\.mkdir'):
        load(scheme)
    assert os.listdir(tmp_path / 'hub' / 'checkpoints') and not (tmp_path / 'it ran').exists()
