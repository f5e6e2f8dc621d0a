"""mmdet's own tools/train.py trains, recalibrates and fuses; nothing of ours runs but the import."""

import os
import subprocess
import sys
from pathlib import Path

import mmdet
from conftest import CONFIGS

from slab_det.measure.report_file import read_report

# As docs/train.md says: mmdet's script imports its models before the config's custom_imports, so slab_det comes first.
COMMAND = """
import runpy, sys
import slab_det
from yapf.yapflib import yapf_api

# As in conftest.py: formatting the config takes a third of the time.
yapf_api.FormatCode = lambda text, **_: (text, True)
runpy.run_path(sys.argv.pop(1), run_name='__main__')
"""


def test_mmdets_train_script_needs_no_patch_of_ours(tmp_path: Path, small_run_cfg) -> None:
    small_run_cfg(max_iters=2, norm_cfg=dict(type='TokenBN'), ffn_norm='pre_act').dump(tmp_path / 'small.py')
    script = str(Path(mmdet.__file__).parent / '.mim/tools/train.py')
    done = subprocess.run(
        [sys.executable, '-c', COMMAND, script, 'small.py', '--work-dir', 'run'],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(CONFIGS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (tmp_path / 'run' / 'iter_2.pth').is_file() and (tmp_path / 'run' / 'fused.pth').is_file()
    unfused, fused = read_report(tmp_path / 'run' / 'report.json')
    assert unfused.recalibration['num_norms']
    assert fused.fusion['folded'] and not fused.fusion['kept'] and fused.fusion['difference']['float64'] <= 1e-9
