"""tools/dist_train.sh and dist_test.sh: two processes without a GPU and without a common work dir."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmdet.evaluation import DumpDetResults
from mmengine.config import Config
from mmengine.runner import Runner
from recorder import digest

REPO = Path(__file__).parents[2]
CONFIG = f"""
_base_ = ['{REPO}/configs/quickstart_mask_rcnn_slab_swin.py']
custom_imports = dict(imports=['slab_det', 'recorder'], allow_failed_imports=False)
generator = dict(num_train=10, num_val=5, size=(96, 80))
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False, dataset=dict(generator=generator))
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(generator=generator))
test_dataloader = val_dataloader
# Through the network: as where the nodes share no file system.
val_evaluator = dict(collect_device='gpu')
test_evaluator = val_evaluator
model = dict(
    backbone=dict(embed_dims=8, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 4), window_sizes=(10, 6, 7, 7)),
    neck=dict(in_channels=[8, 16, 32, 64]))
train_cfg = dict(max_iters=4, val_interval=10)
default_hooks = dict(checkpoint=dict(interval=2))
optim_wrapper = dict(accumulative_counts=2)
auto_scale_lr = dict(enable=False, base_batch_size=2)
custom_hooks = [
    dict(type='ProgressiveNormHook', total=2, unit='iter'),
    dict(type='RecalibrateFuseHook', num_images=5, max_passes=2),
    dict(type='StepRecorder'),
]
work_dir = 'rank{{{{$RANK:0}}}}'
"""


def call(folder, script, *arguments):
    variables = dict(
        PYTHON=sys.executable,
        PYTHONPATH=f'{REPO}:{Path(__file__).parent}',
        CUDA_VISIBLE_DEVICES='',
        OMP_NUM_THREADS='1',
        SLAB_DET_CACHE=str(folder / 'cache'),
    )
    command = [str(REPO / 'tools' / script), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, **variables}, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('dist')
    (folder / 'config.py').write_text(CONFIG)
    call(folder, 'dist_train.sh', 'config.py', 2, '--auto-scale-lr')
    fused = 'rank0/fused_config.py', 'rank0/fused.pth'
    call(folder, 'dist_test.sh', *fused, 2, '--work-dir', 'test', '--out', 'together.pkl')
    return folder


@pytest.fixture(scope='module')
def notes(folder):
    return [json.loads((folder / f'rank{rank}' / 'notes.json').read_text()) for rank in range(2)]


def test_processes_train_alike_and_only_the_main_process_writes(folder, notes):
    first, second = notes
    for rank in notes:
        assert rank['wrapper'] == 'CpuDataParallel' and rank['find_unused'] is False
        assert rank['gammas'] == [[1.0], [0.5], [0.0], [0.0]]
        # Twice the batch of the base: 2 processes with 2 images each.
        assert rank['lr'] == pytest.approx(2 * 1e-3)
        changed = [after != before for before, after in zip(rank['parameters'], rank['parameters'][1:], strict=False)]
        assert changed == [True, False, True], 'one step of the optimizer in two iterations'
    assert first['parameters'] == second['parameters']
    written = ({path.name for path in (folder / f'rank{rank}').glob('*')} for rank in range(2))
    results = {'fused.pth', 'iter_2.pth', 'iter_4.pth', 'report.json', 'fused_config.py'}
    assert [results & names for names in written] == [results, set()]
    saved = digest(torch.load(folder / 'rank0' / 'iter_4.pth', weights_only=False)['state_dict'])
    assert first['end'] == second['end'] == saved
    unfused, fused = json.loads((folder / 'rank0' / 'report.json').read_text())['entries']
    # The five images of recalibration, in the training's batches of two: 2 + 1 in one process, 2 in the other.
    assert unfused['training']['batch_size'] == 4 and unfused['recalibration']['num_batches'] == 3
    assert fused['fusion']['difference']['float64'] < 1e-9


def test_two_processes_predict_what_one_does(folder, monkeypatch):
    monkeypatch.setenv('SLAB_DET_CACHE', str(folder / 'cache'))
    cfg = Config.fromfile(folder / 'rank0' / 'fused_config.py', import_custom_modules=False)
    # It serves a single process too.
    assert 'launcher' not in cfg
    cfg.work_dir, cfg.load_from = str(folder / 'alone'), str(folder / 'rank0' / 'fused.pth')
    runner = Runner.from_cfg(cfg)
    runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=str(folder / 'alone.pkl')))
    runner.test()
    together, alone = (
        {sample['img_id']: sample['pred_instances'] for sample in pickle.loads((folder / name).read_bytes())}
        for name in ('together.pkl', 'alone.pkl')
    )
    assert together.keys() == alone.keys() and len(alone) == 5
    for image, expected in alone.items():
        assert len(expected['scores']) > 0
        torch.testing.assert_close(together[image]['bboxes'], expected['bboxes'], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(together[image]['scores'], expected['scores'], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'script, arguments',
    [('dist_train.sh', ['config.py']), ('dist_test.sh', ['config.py', 'weights.pth'])],
)
def test_missing_arguments_are_answered_with_the_usage(script, arguments):
    done = subprocess.run([str(REPO / 'tools' / script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and f'usage: {script} CONFIG' in done.stderr
