"""The driver of the norm studies, from a declared run to its table, with the real tools on generated images."""

import re
import sys
from pathlib import Path

from mmdet.visualization import DetLocalVisualizer

from benchmarks.norms import run
from benchmarks.results import Results
from slab_det.data import generate


def test_a_study_is_trained_and_published(small_run_cfg, tmp_path: Path, monkeypatch, call) -> None:
    cfg = small_run_cfg(norm_cfg={'type': 'LN'})
    cfg.pop('work_dir'), cfg.pop('experiment_name')
    cfg.dump(tmp_path / 'base.py')
    generate(tmp_path / 'data' / 'shapes', num_train=4, num_val=2, size=(96, 80))
    study = run.Study(tmp_path / 'base.py', 'bbox', iterations=2, images=4, setting='generated')
    monkeypatch.setattr(run, 'STUDIES', {'shapes-norms': study})
    monkeypatch.setattr(run, 'ROOT', tmp_path)
    monkeypatch.setattr(run, 'FOLDER', tmp_path / 'results')
    monkeypatch.setenv('PYTHONPATH', '')
    commands: list[str] = []

    def call_here(command: list[str]) -> None:
        commands.append(Path(command[1]).name)
        # A new process has no visualizer yet; an existing one would write into the folder of its run.
        monkeypatch.setattr(DetLocalVisualizer, '_instance_dict', {})
        call(commands[-1], *command[2:])

    def main(*only: str) -> list[dict]:
        monkeypatch.setattr(sys, 'argv', ['run.py', 'shapes-norms', '--seeds', '0', '--only', *only])
        run.main()
        return Results(tmp_path / 'results/norms_shapes-norms.json').rows

    monkeypatch.setattr(run, 'call', call_here)
    page = tmp_path / 'benchmarks' / 'README.md'
    page.parent.mkdir()
    page.write_text('<!-- norms shapes-norms -->\n')
    found = layer_norm, prepbn = main('ln', 'prepbn')
    assert commands == ['train.py'] * 2 and [row['name'] for row in found] == ['LayerNorm', 'PRepBN, linear']
    assert 0 <= prepbn['AP'] <= 1 and prepbn['recalibration']['passes'] and 'AP_before_recalibration' in prepbn
    assert prepbn['control'] == layer_norm['name'] and 'control' not in layer_norm
    assert '| PRepBN, linear | ' in page.read_text() and '| LayerNorm |' in page.read_text()
    assert main('ln', 'prepbn') == found and len(commands) == 2, 'what is done is skipped'

    (log,) = (tmp_path / 'work_dirs/norms/shapes-norms/prepbn/seed0').glob('*/vis_data/scalars.json')
    log.write_text(re.sub(r'(?<="coco/bbox_mAP": )[-.\d]+', '0.25', log.read_text()))
    assert main('prepbn')[1]['AP_before_recalibration'] == 0.25
