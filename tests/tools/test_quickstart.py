"""The quick start's last page: which form of a model its table says to take, and what stands beside what is found."""

from pathlib import Path

import cv2
import pytest
from conftest import CONFIGS
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from slab_det.cli.quickstart_results import compare, draw_objects, objects_figure
from slab_det.measure.report import ReportEntry


def forms(name: str, ms: float, deployed_ms: float, mask_ap: float, norms: int) -> list[ReportEntry]:
    """One model eager and deployed, where the box AP is 0.001 less."""
    scope = {'scope': 'detector', 'size': [160, 192], 'dtype': 'float32', 'device': 'Some CPU', 'threads': 2}
    scope |= {'rounds': 50, 'warmup': 10, 'cost': {'norms_left': norms}}
    return [
        ReportEntry(
            name,
            *('unfused' if norms else 'fused', 'LN', 'softmax', 'MaskRCNN', 'a.py'),
            ap={'bbox': {'AP': box_ap}, 'segm': {'AP': mask_ap}},
            latency=scope | {'median_ms': time},
            dataset={'ann_file': 'instances_val.json', 'images': 100},
        )
        for time, box_ap in ((ms, 0.56), (deployed_ms, 0.559))
    ]


def test_table_says_which_form_to_take_and_which_is_slower_than_layernorm() -> None:
    models = (('Swin', 40, 30, 0.69, 24), ('Swin-absorbed', 36, 27, 0.68, 1), ('SLAB-Swin', 44, 24, 0.66, 0))
    table = compare([form for model in models for form in forms(*model)])
    rows = [line.strip('| ').split(' | ') for line in table.splitlines() if line.startswith('| S')]
    assert rows == [
        ['Swin', '24', '56.0', '69.0', '40.0 (1.00)', '30.0 (1.00)', 'deployed'],
        ['Swin-absorbed', '1', '56.0', '68.0', '36.0 (0.90)', '27.0 (0.90)', 'deployed'],
        ['SLAB-Swin', '0', '56.0', '66.0', '44.0 (1.10)', '24.0 (0.80)', 'deployed; slower than LayerNorm eager'],
    ]
    assert '100 images' in table and '160x192' in table and 'by at most 0.1' in table


# A random detector finds boxes that leave the image.
@pytest.mark.filterwarnings('ignore::UserWarning:mmengine', 'ignore::DeprecationWarning:numpy')
def test_what_is_found_stands_beside_the_truth(small_detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('SLAB_DET_CACHE', str(tmp_path))
    cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_swin.py').val_dataloader.dataset
    cfg.generator = dict(num_train=1, num_val=3, size=(96, 80))
    init_default_scope('mmdet')
    dataset = DATASETS.build(cfg)
    drawn = draw_objects({'one': small_detector(), 'another': small_detector(seed=1)}, dataset)
    for index, panels in enumerate(drawn):
        plain = cv2.imread(dataset.get_data_info(index)['img_path'])[..., ::-1]
        assert {name: pixels.shape for name, pixels in panels.items()} == dict.fromkeys(panels, plain.shape)
        assert (panels['truth'] != plain).any() and (panels['truth'] != panels['one']).any()
    figure = objects_figure(drawn)
    assert [axes.get_title() for axes in figure.axes] == ['truth', 'one', 'another'] + [''] * 6
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= figure.get_size_inches()[0]
