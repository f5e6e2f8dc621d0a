"""tools/dist_train.sh and test.py: two processes without a GPU and without a common work dir."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH
from mmengine.config import Config
from ranks import in_processes
from torch import distributed

from slab_det.cli import command
from slab_det.cli.test import main

REPO = Path(__file__).parents[2]
CONFIG = f"""
_base_ = ['{REPO}/configs/quickstart_mask_rcnn_slab_swin.py']
custom_imports = dict(imports=['slab_det'], allow_failed_imports=False)
generator = dict(num_train=10, num_val=5, size=(96, 80))
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False, dataset=dict(generator=generator))
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(generator=generator))
test_dataloader = val_dataloader
# Through the network: as where the nodes share no file system.
val_evaluator = dict(collect_device='gpu')
test_evaluator = val_evaluator
model = dict(
    backbone=dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), window_sizes=(10, 6, 7, 7)),
    neck=dict(in_channels=[8, 16, 32, 64], out_channels=16), rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16), bbox_head=dict(in_channels=16, fc_out_channels=64),
        mask_roi_extractor=dict(out_channels=16), mask_head=dict(in_channels=16, conv_out_channels=16)))
train_cfg = dict(max_iters=4, val_interval=10)
default_hooks = dict(checkpoint=dict(interval=2))
auto_scale_lr = dict(enable=False, base_batch_size=2)
custom_hooks = [
    dict(type='ProgressiveNormHook', total=2, unit='iter'),
    dict(type='RecalibrateFuseHook', num_images=5, max_passes=2),
]
work_dir = 'rank{{{{$RANK:0}}}}'
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder, with a space in its name, in which dist_train.sh has trained."""
    folder = tmp_path_factory.mktemp('two processes')
    (folder / 'config.py').write_text(CONFIG)
    variables = dict(PYTHON=sys.executable, PYTHONPATH=PYTHONPATH, SLAB_DET_CACHE=str(folder / 'cache'))
    command = [str(REPO / 'tools/dist_train.sh'), str(folder / 'config.py'), '2', '--auto-scale-lr']
    environment = {**os.environ, **variables, 'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


def test_processes_share_the_images_and_only_the_main_process_writes(folder):
    written = ({path.name for path in (folder / f'rank{rank}').glob('*')} for rank in range(2))
    results = {'fused.pth', 'iter_2.pth', 'iter_4.pth', 'report.json', 'fused_config.py'}
    assert [results & names for names in written] == [results, set()]
    optimizer = torch.load(folder / 'rank0' / 'iter_4.pth', weights_only=False)['optimizer']
    # Twice the batch of the base: 2 processes with 2 images each.
    assert optimizer['param_groups'][0]['initial_lr'] == pytest.approx(2 * 1e-3)
    unfused, fused = json.loads((folder / 'rank0' / 'report.json').read_text())['entries']
    # The five images of recalibration, in the training's batches of two: 2 + 1 in one process, 2 in the other.
    assert unfused['training']['batch_size'] == 4 and unfused['recalibration']['num_batches'] == 3
    assert fused['fusion']['difference']['float64'] < 1e-9


def test_two_processes_predict_what_one_does(folder, monkeypatch):
    monkeypatch.setenv('SLAB_DET_CACHE', str(folder / 'cache'))
    monkeypatch.chdir(folder)
    # It serves a single process too.
    assert 'launcher' not in Config.fromfile('rank0/fused_config.py', import_custom_modules=False)
    command = 'test.py rank0/fused_config.py rank0/fused.pth --work-dir test --out'.split()
    for count, options in ((2, ['together.pkl', '--launcher', 'pytorch']), (1, ['alone.pkl'])):
        monkeypatch.setattr(sys, 'argv', command + options)
        in_processes(count, main)
    together, alone = (
        {sample['img_id']: sample['pred_instances'] for sample in pickle.loads((folder / name).read_bytes())}
        for name in ('together.pkl', 'alone.pkl')
    )
    assert together.keys() == alone.keys() and len(alone) == 5
    for image, expected in alone.items():
        assert len(expected['scores']) > 0
        torch.testing.assert_close(together[image]['bboxes'], expected['bboxes'], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(together[image]['scores'], expected['scores'], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('script', 'positional'), [('dist_train.sh', 1), ('dist_test.sh', 2)])
def test_a_script_passes_its_arguments_on_as_they_are(script, positional, tmp_path):
    # A recorder stands for python.
    recorder = tmp_path / 'recorder'
    recorder.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"{tmp_path}/notes"\n')
    recorder.chmod(0o755)
    hostile = 'a b; $(touch pwned) *'
    command = [str(REPO / 'tools' / script), *[hostile] * positional, '2', hostile]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, 'PYTHON': str(recorder)}, check=True)
    notes = (tmp_path / 'notes').read_text().splitlines()
    assert notes.count(hostile) == positional + 1, notes
    assert not (tmp_path / 'pwned').exists()


@pytest.mark.parametrize('opened_before', [False, True])
def test_a_command_closes_the_process_group_that_it_opened(opened_before, monkeypatch, tmp_path):
    """Otherwise gloo may abort the interpreter at its end, and a finished training exits with an error."""
    monkeypatch.setattr(sys, 'argv', ['train.py'])

    def open_group(*_):
        distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)

    if opened_before:
        open_group()
    try:
        command(lambda parser: None)(lambda args: None if opened_before else open_group())()
        assert distributed.is_initialized() == opened_before
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
