"""The command lines one after the other, as a user types them, on a small model and a few generated images."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import differing, relative_difference
from mmengine.config import Config

from slab_det.checkpoints import build_detector
from slab_det.cli.screen import DUMPS, EVALUATION
from slab_det.measure.report_file import read_report
from slab_det.norms import named_progressive_norms


@pytest.fixture
def run(call: Callable) -> Callable[[str], str]:
    """A function: what ``python tools/COMMAND`` prints."""
    return lambda command: call(*shlex.split(command)).out


def dump_without_folder(cfg, path: Path) -> None:
    cfg.pop('work_dir')
    cfg.pop('experiment_name')
    cfg.dump(path)


def test_train_test_fuse_measure_and_report(small_run_cfg, call, run, tmp_path):
    cfg = small_run_cfg('unused', max_iters=2, depths=(1, 1, 1, 1))
    cfg.default_hooks.logger.interval = 1
    dump_without_folder(cfg, tmp_path / 'small.py')
    printed = call('train.py', 'small.py', '--work-dir', 'run')
    preamble, _, after = printed.out.partition('Iter(train)')
    assert len((preamble + printed.err).splitlines()) <= 60, preamble + printed.err
    assert re.search('Iter\\(val\\).*coco/bbox_mAP', after) and 'Recalibrated: coco/bbox_mAP' in after
    (log,) = (tmp_path / 'run').glob('*/*.log')
    for text in (*DUMPS, *EVALUATION, 'creating index', 'Average Precision'):
        assert text not in printed.out and text in log.read_text(), text
    checkpoint = 'run/iter_2.pth'
    rounds = '--rounds 3 --warmup 1'
    for model in (f'small.py {checkpoint}', 'run/fused_config.py run/fused.pth'):
        report = '--work-dir tested --report run/report.json --show-dir drawn --latency'
        screen = run(f'test.py {model} {report} {rounds}')
        assert re.search(r'\| ms \|.*box AP', screen) and not [text for text in DUMPS if text in screen]
        assert [*Path(re.search('Predictions drawn in (.*)', screen)[1]).iterdir()]

    entries = {entry.variant: entry for entry in read_report(tmp_path / 'run' / 'report.json')}
    assert entries['fused'].ap == entries['unfused'].ap
    for entry in entries.values():
        assert entry.latency['rounds'] == 3 and entry.latency['median_ms'] > 0
        assert entry.latency['size'] == [160, 192], 'as tested'

    run(f'fuse.py small.py {checkpoint} --out again.pth')
    assert (tmp_path / 'again.pth').is_file() and (tmp_path / 'again_config.py').is_file()
    recalibrate = f'recalibrate.py small.py {checkpoint} --out settled.pth --num-images 4 --json settled.json'
    assert 'Written to settled.pth' in run(recalibrate)
    report = json.loads((tmp_path / 'settled.json').read_text())
    # Four images, two in a batch as in training.
    assert report['converged'] and report['num_batches'] == 2
    settled, trained = (torch.load(tmp_path / file, weights_only=False) for file in ('settled.pth', checkpoint))
    assert settled['meta']['dataset_meta']['classes'] == trained['meta']['dataset_meta']['classes']
    changed = differing(settled['state_dict'], trained['state_dict'])
    assert {key.rpartition('.')[2] for key in changed} == {'running_mean', 'running_var'}
    output = run(
        f'latency.py small.py run/fused_config.py --checkpoint {checkpoint} run/fused.pth --scope backbone {rounds} '
        '--size 64 96 --json latency.json'
    )
    assert 'small (unfused)' in output and 'fused_config (fused)' in output
    run('report.py run/report.json --out table')
    assert {path.name for path in (tmp_path / 'table').iterdir()} == {'table.md', 'ap_latency.svg', '.slab_det_report'}


def test_a_training_with_prepbn_starts_from_a_layernorm_detector(small_run_cfg, run, tmp_path):
    cfg = small_run_cfg('unused', max_iters=2, depths=(1, 1, 1, 1))
    dump_without_folder(cfg, tmp_path / 'prepbn.py')
    cfg.model.backbone.norm_cfg = dict(type='LN')
    cfg.custom_hooks = []
    cfg.dump(tmp_path / 'layernorm.py')
    run('train.py layernorm.py --work-dir run')
    layer_norm, prepbn = (
        build_detector(Config.fromfile(f'{name}.py'), 'run/iter_2.pth') for name in ('layernorm', 'prepbn')
    )
    assert {norm.gamma for norm in named_progressive_norms(prepbn).values()} == {1.0}
    image = torch.randn(1, 3, 70, 90)
    with torch.no_grad():
        assert relative_difference(prepbn.extract_feat(image), layer_norm.extract_feat(image)) < 1e-4
    run('train.py prepbn.py --work-dir tuned --cfg-options load_from=run/iter_2.pth model.backbone.init_cfg=None')
    (log,) = (tmp_path / 'tuned').glob('*/*.log')
    assert re.search(r'run/iter_2\.pth(?s:.*)gamma\W+1 in \d+ norms', log.read_text())
    (fused,) = (entry for entry in read_report(tmp_path / 'tuned' / 'report.json') if entry.variant == 'fused')
    assert fused.fusion['kept'] == fused.fusion['affine'] == 0 < fused.fusion['folded']
