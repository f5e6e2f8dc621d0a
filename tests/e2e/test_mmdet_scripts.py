"""mmdet's own scripts train, recalibrate and fuse a detector, and test it; nothing of ours runs but the import."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import mmdet
from conftest import CONFIGS, PYTHONPATH

from slab_det.measure.report_file import read_report

SCRIPTS = Path(mmdet.__file__).parent / '.mim' / 'tools'
# mmdet's script imports its models before the config's custom_imports, so slab_det comes first.
TRAIN = "import runpy, sys, slab_det; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def run(folder: Path, *arguments: object) -> str:
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, 'PYTHONPATH': PYTHONPATH}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_mmdets_scripts_need_no_patch_of_ours_and_take_the_fused_pair(tmp_path: Path, small_run_cfg) -> None:
    small_run_cfg(max_iters=2, norm_cfg=dict(type='TokenBN'), ffn_norm='pre_act').dump(tmp_path / 'small.py')
    run(tmp_path, '-c', TRAIN, SCRIPTS / 'train.py', 'small.py', '--work-dir', 'run')
    assert (tmp_path / 'run' / 'iter_2.pth').is_file()
    unfused, fused = read_report(tmp_path / 'run' / 'report.json')
    assert unfused.recalibration['num_norms']
    assert fused.fusion['folded'] and not fused.fusion['kept'] and fused.fusion['difference']['float64'] <= 1e-9
    page = (CONFIGS.parent / 'docs/train.md').read_text().replace('\\\n', ' ')
    (line,) = re.findall(r'^python (-c .*?fused\.pth)$', page, flags=re.MULTILINE | re.DOTALL)
    line = line.replace('mmdetection/tools', str(SCRIPTS)).replace('work_dirs/run', 'run')
    assert 'coco/bbox_mAP: ' in run(tmp_path, *shlex.split(line), '--work-dir', 'tested')
