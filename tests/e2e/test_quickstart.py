"""The quick start with small detectors, few images and iterations, and what its trained detectors are worth."""

from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
from conftest import run_tool
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.registry import init_default_scope

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.cli import quickstart, quickstart_results
from slab_det.cli.quickstart_results import draw_objects, predictions_figure
from slab_det.measure.evaluate import evaluate
from slab_det.measure.report_file import read_report

ITERATIONS = 80
OPTIONS = [
    *(
        f'{split}_dataloader.{key}'
        for split in ('train', 'val')
        for key in ('num_workers=0', 'persistent_workers=False')
    ),
    *(
        f'{split}_dataloader.dataset.generator.{key}'
        for split in ('train', 'val')
        for key in ('num_train=24', 'num_val=6', 'size=(96,80)')
    ),
    'val_dataloader.dataset.pipeline.1.scale=(96,80)',
    f'train_cfg.max_iters={ITERATIONS}',
    f'train_cfg.val_interval={ITERATIONS}',
    f'default_hooks.checkpoint.interval={ITERATIONS}',
    'optim_wrapper.optimizer.lr=4e-3',
    'param_scheduler.0.end=10',
    'param_scheduler.1.begin=10',
    f'param_scheduler.1.end={ITERATIONS}',
    f'param_scheduler.1.T_max={ITERATIONS - 10}',
    'model.backbone.depths=(1,1,1,1)',
    'model.backbone.embed_dims=16',
    'model.neck.in_channels=[16,32,64,128]',
    *(
        f'model.{part}=32'
        for part in (
            'neck.out_channels',
            'rpn_head.in_channels',
            'rpn_head.feat_channels',
            'roi_head.bbox_roi_extractor.out_channels',
            'roi_head.bbox_head.in_channels',
            'roi_head.mask_roi_extractor.out_channels',
            'roi_head.mask_head.in_channels',
            'roi_head.mask_head.conv_out_channels',
        )
    ),
    'model.roi_head.bbox_head.fc_out_channels=64',
    'model.test_cfg.rpn.max_per_img=30',
    'model.test_cfg.rcnn.max_per_img=20',
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the quick start leaves. Its tools run in this process, and measure forms for a second."""
    folder = tmp_path_factory.mktemp('quickstart')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv('SLAB_DET_CACHE', str(folder / 'cache'))
        patch.setattr(quickstart, 'MINUTES', 0.02)
        patch.setattr(quickstart_results, 'SIZE', (80, 96))

        def call(tool: str, *arguments: object) -> None:
            assert run_tool(patch, tool, *arguments) == 0, tool

        patch.setattr(quickstart, 'call', call)
        call('quickstart.py', '--work-dir', 'run', '--cfg-options', *OPTIONS)
        yield folder / 'run'


def test_the_quick_start_leaves_tables_pictures_and_a_detector_to_serve(folder: Path) -> None:
    rows = [line.strip('| ').split(' | ') for line in (folder / 'table.md').read_text().splitlines()[2:4]]
    assert [row[0] for row in rows] == [*quickstart.MODELS] and rows[0][-1] == '1'
    entries = {entry.name: entry for entry in read_report(folder / 'report.json') if entry.latency}
    assert [entries[name].latency['cost']['norms_left'] for name in quickstart.MODELS] == [1 + 2 * 4 + 3 + 4, 0]
    assert all((folder / name).stat().st_size for name in ('predictions.png', 'optimized/objects.png'))
    detector = slab_det.load_detector(folder / 'optimized')
    assert detector.classes == slab_det.data.SyntheticShapes.METAINFO['classes']
    assert len(detector(next(folder.parent.glob('cache/**/val/*.png'))).pred_instances)


def test_ap_of_trained_detectors_stays_when_they_are_fused_and_deployed(folder: Path) -> None:
    config, last = folder / 'quickstart_mask_rcnn_bn_ffnbn_swin.py', folder / f'iter_{ITERATIONS}.pth'
    unfused = build_detector(Config.fromfile(config), str(last))
    layer_norm = build_detector(
        Config.fromfile(folder / 'layernorm/quickstart_mask_rcnn_swin.py'),
        str(folder / f'layernorm/iter_{ITERATIONS}.pth'),
    )
    fused = slab_det.fuse(unfused)
    written = build_detector(Config.fromfile(folder / 'fused_config.py'), str(folder / 'fused.pth'))
    for first, *others in (
        (unfused, fused, written, slab_det.deploy(fused)),
        (layer_norm, slab_det.deploy(layer_norm)),
    ):
        ap, *found = (
            {kind: x['AP'] for kind, x in evaluate(m, Config.fromfile(config)).items()} for m in (first, *others)
        )
        assert ap['bbox'] > 0.01, ap
        assert found == [pytest.approx(ap, abs=1e-3)] * len(found)


def test_predictions_are_drawn_beside_truth(folder: Path) -> None:
    init_default_scope('mmdet')
    cfg = Config.fromfile(folder / 'fused_config.py')
    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    detector = build_detector(cfg, str(folder / 'fused.pth'))
    drawn = draw_objects({'one': detector, 'another': detector}, dataset)
    for index, panels in enumerate(drawn):
        plain = cv2.imread(dataset.get_data_info(index)['img_path'])[..., ::-1]
        assert {name: pixels.shape for name, pixels in panels.items()} == dict.fromkeys(panels, plain.shape)
        assert (panels['truth'] != plain).any() and (panels['truth'] != panels['one']).any()
        for name in ('one', 'another'):
            assert (panels[name] == plain).all(-1).mean() > 0.1, 'labels do not shrink the image'
    figure = predictions_figure(drawn)
    assert [axes.get_title() for axes in figure.axes] == ['truth', 'one', 'another'] + [''] * 6
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= figure.get_size_inches()[0]
