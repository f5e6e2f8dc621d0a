"""The driver of the norm studies, from a declared run to its table, with the real tools on generated images."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import cv2
from conftest import NEEDS_MMPRETRAIN
from mmdet.registry import MODELS
from mmdet.visualization import DetLocalVisualizer
from mmengine.config import Config

from benchmarks.norms import run
from slab_det.data import generate
from slab_det.norms import named_offline_norms


def test_a_study_is_trained_and_published(small_run_cfg, tmp_path: Path, monkeypatch, call) -> None:
    cfg = small_run_cfg(norm_cfg={'type': 'LN'})
    cfg.pop('work_dir'), cfg.pop('experiment_name')
    cfg.dump(tmp_path / 'base.py')
    generate(tmp_path / 'data' / 'shapes', num_train=4, num_val=2, size=(96, 80))
    study = run.Study(tmp_path / 'base.py', 'bbox', iterations=2, images=4, setting='generated')
    starts = replace(study, other='shapes-norms')
    monkeypatch.setattr(run, 'STUDIES', {'shapes-norms': study, 'shapes-starts': starts})
    monkeypatch.setattr(run, 'ROOT', tmp_path)
    monkeypatch.setenv('PYTHONPATH', '')
    commands: list[str] = []

    def call_here(command: list[str]) -> None:
        commands.append(Path(command[1]).name)
        # A new process would have no visualizer yet; that of the last call writes into its own folder.
        monkeypatch.setattr(DetLocalVisualizer, '_instance_dict', {})
        call(commands[-1], *command[2:])

    def main(study: str, *only: str) -> dict:
        monkeypatch.setattr(sys, 'argv', ['run.py', study, '--seeds', '0', '--only', *only])
        run.main()
        return json.loads((tmp_path / f'benchmarks/results/norms_{study}.json').read_text())['runs']

    monkeypatch.setattr(run, 'call', call_here)
    page = tmp_path / 'docs' / 'results.md'
    page.parent.mkdir()
    page.write_text('<!-- norms shapes-norms -->\n\n<!-- norms shapes-starts -->\n')
    found = main('shapes-norms', 'ln', 'prepbn')
    assert commands == ['train.py'] * 2 and list(found) == ['ln', 'prepbn']
    served = found['prepbn']['seeds']['0']
    assert 0 <= served['ap'] <= 1 and served['recalibration']['passes'] and 'ap_before_recalibration' in served
    assert '| PRepBN, linear | ' in page.read_text() and '| LayerNorm |' in page.read_text()
    assert main('shapes-norms', 'ln', 'prepbn') == found and len(commands) == 2, 'what is done is skipped'

    (log,) = (tmp_path / 'work_dirs/norms/shapes-norms/prepbn/seed0').glob('*/vis_data/scalars.json')
    log.write_text(re.sub(r'(?<="coco/bbox_mAP": )[-.\d]+', '0.25', log.read_text()))
    assert main('shapes-norms', 'prepbn')['prepbn']['seeds']['0']['ap_before_recalibration'] == 0.25

    main('shapes-starts', 'prepbn_0.8_from_other')
    assert len(commands) == 3, 'the detector of the other study is trained already'
    runs = tmp_path / 'work_dirs/norms'
    merged = Config.fromfile(runs / 'shapes-starts/prepbn_0.8_from_other/seed0/merged/config.py')
    assert merged.model.backbone.init_cfg.checkpoint == str(runs / 'shapes-norms/ln/seed0/iter_2.pth')


@NEEDS_MMPRETRAIN
def test_a_detector_starts_from_a_classifier_of_its_objects(small_run_cfg, tmp_path, monkeypatch, call):
    cfg = small_run_cfg(norm_cfg={'type': 'LN'})
    cfg.dump(tmp_path / 'base.py')
    data = generate(tmp_path / 'data', num_train=8, num_val=4, size=(96, 80))
    classifier = Config.fromfile(run.ROOT / run.CLASSIFIER)
    classifier.model.backbone = dict(cfg.model.backbone, type='mmdet.SLABSwin', out_indices=(3,))
    classifier.model.head.num_classes = classifier.data_preprocessor.num_classes = 4
    classifier.model.head.in_channels = 8 * cfg.model.backbone.embed_dims
    classifier.dump(tmp_path / 'classifier.py')
    monkeypatch.setattr(run, 'CLASSIFIER', tmp_path / 'classifier.py')
    monkeypatch.setattr(run, 'CLASSIFIER_ITERATIONS', 2)
    monkeypatch.setattr(run, 'call', lambda command: call(Path(command[1]).name, *command[2:]))

    study = run.Study(tmp_path / 'base.py', 'bbox', iterations=2, images=4, setting='')
    checkpoint = run.train_classifier('prepbn', 0, tmp_path / 'runs', data)
    classes = sorted(folder.name for folder in (tmp_path / 'runs/cells/train').iterdir())
    assert len(classes) == 4 and all((tmp_path / 'runs/cells/val' / name).is_dir() for name in classes)
    assert cv2.imread(str(next((tmp_path / 'runs/cells/train').glob('*/*.png')))).shape == (64, 64, 3)

    name = 'prepbn_0.8_from_prepbn'
    model = MODELS.build(run.run_config(study, name, 0, checkpoint).model)
    model.init_weights()
    gammas = {norm.gamma for key, norm in named_offline_norms(model.backbone) if not key.startswith('norm')}
    assert gammas == {0.0}, 'the decay of the classifier was finished'
