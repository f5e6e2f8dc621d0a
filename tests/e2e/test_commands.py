"""The command lines one after the other, as a user types them, on a small model and a few generated images."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from conftest import CONFIGS

from slab_det.measure.report import read_report

TOOLS = CONFIGS.parent / 'tools'


def call(tool, *arguments, cwd):
    environment = {**os.environ, 'PYTHONPATH': str(CONFIGS.parent)}
    result = subprocess.run(
        [sys.executable, str(TOOLS / tool), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f'{tool}: {result.stdout[-3000:]}\n{result.stderr[-3000:]}'
    return result.stdout


def test_train_test_fuse_measure_and_report(small_run_cfg, tmp_path):
    cfg = small_run_cfg('unused')
    cfg.pop('work_dir')
    cfg.pop('experiment_name')
    cfg.dump(tmp_path / 'small.py')
    call('train.py', 'small.py', '--work-dir', 'run', cwd=tmp_path)
    run = tmp_path / 'run'
    checkpoint = Path((run / 'last_checkpoint').read_text())
    assert (tmp_path / checkpoint).name == 'iter_6.pth'
    latency = ('--latency', '--rounds', 3, '--warmup', 1, '--size', 64, 96)
    for config, weights in (('small.py', checkpoint), ('run/fused_config.py', 'run/fused.pth')):
        output = call(
            'test.py',
            config,
            weights,
            '--work-dir',
            'tested',
            '--report',
            'run/report.json',
            '--show-dir',
            'drawn',
            *latency,
            cwd=tmp_path,
        )
        assert re.search(r'\| ms \|.*box AP', output)
    assert len(list(tmp_path.glob('tested/*/drawn/*'))) > 0

    entries = {entry.variant: entry for entry in read_report(run / 'report.json').entries}
    assert entries['fused'].ap == entries['unfused'].ap
    for entry in entries.values():
        assert entry.latency['rounds'] == 3 and entry.latency['median_ms'] > 0

    call('fuse.py', 'small.py', checkpoint, '--out', 'again.pth', cwd=tmp_path)
    assert (tmp_path / 'again.pth').is_file() and (tmp_path / 'again_config.py').is_file()
    output = call(
        'recalibrate.py',
        'small.py',
        checkpoint,
        '--out',
        'settled.pth',
        '--num-images',
        4,
        '--json',
        'settled.json',
        cwd=tmp_path,
    )
    assert 'Written to settled.pth' in output
    report = json.loads((tmp_path / 'settled.json').read_text())
    assert report['converged'] and report['num_batches'] == 4 and 0 < report['drift']['mean'] < 1
    settled, trained = (torch.load(tmp_path / file, weights_only=False) for file in ('settled.pth', checkpoint))
    assert settled['meta']['dataset_meta']['classes'] == trained['meta']['dataset_meta']['classes']
    assert {
        key.rpartition('.')[2]
        for key, value in settled['state_dict'].items()
        if not torch.equal(value, trained['state_dict'][key])
    } == {'running_mean', 'running_var'}
    call('fuse.py', 'small.py', 'settled.pth', '--out', 'settled_fused.pth', cwd=tmp_path)
    output = call(
        'latency.py',
        'small.py',
        'run/fused_config.py',
        '--checkpoint',
        checkpoint,
        'run/fused.pth',
        '--scope',
        'backbone',
        '--rounds',
        3,
        '--warmup',
        1,
        '--size',
        64,
        96,
        '--json',
        'latency.json',
        cwd=tmp_path,
    )
    assert 'small (unfused)' in output and 'fused_config (fused)' in output
    call('report.py', 'run/report.json', '--out', 'table', '--paper', cwd=tmp_path)
    assert (tmp_path / 'table' / 'table.md').is_file() and (tmp_path / 'table' / 'ap_latency.png').is_file()


def test_convert_and_finetune_a_layernorm_detector(small_run_cfg, tmp_path):
    cfg = small_run_cfg('unused', max_iters=2)
    cfg.pop('work_dir')
    cfg.pop('experiment_name')
    cfg.dump(tmp_path / 'schedule.py')
    cfg.model.backbone.norm_cfg = dict(type='LN')
    cfg.custom_hooks = []
    cfg.dump(tmp_path / 'layernorm.py')
    call('train.py', 'layernorm.py', '--work-dir', 'run', cwd=tmp_path)
    output = call(
        'convert_checkpoint.py',
        'run/iter_2.pth',
        'prepbn.pth',
        '--config',
        'layernorm.py',
        '--num-images',
        4,
        '--schedule',
        'schedule.py',
        cwd=tmp_path,
    )
    assert re.search(r'2\d norms converted, 0 kept\n  an affine map explains \d', output)
    call('train.py', 'prepbn_config.py', '--work-dir', 'tuned', cwd=tmp_path)
    (fused,) = (entry for entry in read_report(tmp_path / 'tuned' / 'report.json').entries if entry.variant == 'fused')
    assert fused.fusion['kept'] == fused.fusion['affine'] == 0 < fused.fusion['folded']
