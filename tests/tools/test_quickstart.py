"""The results of the quick start: its table, and the picture of the objects that each model finds."""

from pathlib import Path

import cv2
import pytest
from conftest import CONFIGS
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from slab_det.cli.quickstart_results import compare, draw_objects, objects_figure
from slab_det.measure.report_file import ReportEntry


def entry(name: str, ratio: tuple[float, float, float], mask_ap: float, norms: int) -> ReportEntry:
    """The report entry of a deployed model."""
    latency = {'scope': 'detector', 'size': [320, 384], 'dtype': 'float32', 'device': 'Some CPU', 'threads': 2}
    latency |= {'rounds': 20, 'warmup': 5, 'cost': {'norms_left': norms}, 'deployed': True}
    return ReportEntry(
        name,
        *('unfused' if norms else 'fused', 'LN', 'softmax', 'MaskRCNN', 'a.py'),
        ap={'bbox': {'AP': 0.56}, 'segm': {'AP': mask_ap}},
        latency=latency | {'median_ms': 50 * ratio[1], 'ratio': ratio[1], 'ratio_quartiles': ratio[::2]},
        dataset={'ann_file': 'instances_val.json', 'images': 100},
    )


def test_table_has_ratios_with_quartiles() -> None:
    table = compare([entry('LayerNorm', (1, 1, 1), 0.69, 24), entry('BN+FFNBN', (0.75, 0.8, 0.98), 0.68, 0)])
    rows = [line.strip('| ').split(' | ') for line in table.splitlines() if line.startswith(('| L', '| B'))]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ['LayerNorm', '24', '56.0', '69.0', '50.0', '1'],
        ['BN+FFNBN', '0', '56.0', '68.0', '40.0', '0.80 (0.75 to 0.98)'],
    ]
    assert '100 generated images' in table and '320x384' in table


# A random detector finds boxes that leave the image.
@pytest.mark.filterwarnings('ignore::UserWarning:mmengine', 'ignore::DeprecationWarning:numpy')
def test_predictions_are_drawn_beside_truth(small_detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        for name in ('one', 'another'):
            assert (panels[name] == plain).all(-1).mean() > 0.5, 'labels do not shrink the image'
    figure = objects_figure(drawn)
    assert [axes.get_title() for axes in figure.axes] == ['truth', 'one', 'another'] + [''] * 6
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= figure.get_size_inches()[0]
