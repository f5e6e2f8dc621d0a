"""The driver of the norm studies, from a declared study to its table, with the real tools on generated images."""

import json
import sys
from pathlib import Path

from mmdet.visualization import DetLocalVisualizer

from benchmarks.norms import run
from benchmarks.norms.studies import Base, Norms, Recalibration, Run, Study
from slab_det.data import generate


def test_a_study_is_trained_evaluated_and_published(small_run_cfg, tmp_path: Path, monkeypatch, call) -> None:
    cfg = small_run_cfg(norm_cfg={'type': 'LN'})
    cfg.pop('work_dir'), cfg.pop('experiment_name')
    cfg.dump(tmp_path / 'base.py')
    generate(tmp_path / 'data' / 'shapes', num_train=4, num_val=2, size=(96, 80))
    base = Base('shapes', tmp_path / 'base.py', 'bbox', iterations=2, validations=1, images=4, setting='generated')
    # The studies' own schedule warms up for 100 iterations.
    short = {'param_scheduler': [], 'default_hooks': {'checkpoint': {'interval': 1}}}
    ln, prepbn = Run('ln', 'LayerNorm', (short,)), Run('prepbn', 'PRepBN', (Norms(base).prepbn(), short))
    ways = (Recalibration(prepbn, 0), Recalibration(prepbn, 4, passes=1))
    studies = (Study('norms', base, 'Which?', (ln, prepbn)), Study('ways', base, 'How?', (prepbn,), ways))
    monkeypatch.setattr(run, 'STUDIES', {study.name: study for study in studies})
    monkeypatch.setattr(run, 'ROOT', tmp_path)
    monkeypatch.setenv('PYTHONPATH', '')
    commands: list[str] = []

    def call_here(command: list[str]) -> None:
        commands.append(Path(command[1]).name)
        # A new process would have no visualizer yet; that of the last call writes into its own folder.
        monkeypatch.setattr(DetLocalVisualizer, '_instance_dict', {})
        assert call(commands[-1], *command[2:]).code == 0, command

    def study(name: str, *arguments: object) -> dict:
        monkeypatch.setattr(sys, 'argv', ['run.py', name, '--seeds', '0', *map(str, arguments)])
        commands.clear()
        run.main()
        return json.loads((tmp_path / f'benchmarks/results/norms_{name}.json').read_text())['runs']

    monkeypatch.setattr(run, 'call', call_here)
    page = tmp_path / 'docs' / 'results.md'
    page.parent.mkdir()
    page.write_text('<!-- norms norms -->\n\n<!-- norms ways -->\n')
    trained = study('norms')
    # LayerNorm is trained; PRepBN is trained, and resumed to be recalibrated and fused.
    assert commands == ['train.py'] * 3 and list(trained) == ['ln', 'prepbn']
    served = trained['prepbn']['seeds']['0']
    assert 0 <= served['ap'] <= 1 and served['recalibration']['passes'] and 'ap_before_recalibration' in served
    evaluated = study('ways')
    # The training of the other study is there already.
    assert commands == ['test.py', 'recalibrate.py', 'test.py']
    as_trained = evaluated['prepbn@0']['seeds']['0']
    assert as_trained['ap'] == served['ap_before_recalibration'] and as_trained['recalibration'] is None
    assert evaluated['prepbn@4x1']['seeds']['0']['recalibration']['drift']
    assert page.read_text().count('| PRepBN: ') == 2 and '| LayerNorm |' in page.read_text()
    assert study('ways') == evaluated and not commands, 'what is done is skipped'
