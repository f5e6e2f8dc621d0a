"""A segmentor of mmsegmentation goes the way of detectors: training, recalibration, fusion, test, report."""

from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import CONFIGS, SLA, SMALL_SWIN

from slab_det.measure.report import read_report

pytestmark = pytest.mark.skipif(
    find_spec('mmseg') is None, reason='mmsegmentation is not installed: pip install onedl-mmsegmentation'
)
CONFIG = """
_base_ = ['CONFIGS/_base_/runtime.py', 'CONFIGS/_base_/prepbn.py', 'MMSEG/_base_/models/upernet_swin.py']

default_scope = 'mmseg'
visualizer = dict(_delete_=True, type='SegLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
norm = dict(type='BN')
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=BACKBONE,
    decode_head=dict(in_channels=[8, 16, 32, 64], channels=16, num_classes=2, norm_cfg=norm),
    auxiliary_head=dict(in_channels=32, channels=16, num_classes=2, norm_cfg=norm),
)
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(type='InfiniteSampler'),
    dataset=dict(
        type='BaseSegDataset',
        data_root='nowhere',
        data_prefix=dict(img_path='images', seg_map_path='masks'),
        img_suffix='.png',
        metainfo=dict(classes=('ground', 'disk'), palette=[[0, 0, 0], [255, 0, 0]]),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='Resize', scale=(64, 64)),
            dict(type='PackSegInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        train_dataloader['dataset'],
        # Masks stay as large as the image is in the file, which results are brought back to.
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='Resize', scale=(64, 64)),
            dict(type='LoadAnnotations'),
            dict(type='PackSegInputs'),
        ],
    ),
)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
val_cfg = test_cfg = dict()
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2, val_interval=2)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4))
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=2), visualization=dict(_delete_=True, type='SegVisualizationHook')
)
log_processor = dict(by_epoch=False)
"""


def draw_disks(root: Path) -> None:
    """Six disks on noise, 80x70, and their masks."""
    rng = np.random.default_rng(0)
    for folder in ('images', 'masks'):
        (root / folder).mkdir(parents=True)
    for index in range(6):
        image, mask = rng.integers(0, 100, (70, 80, 3), dtype=np.uint8), np.zeros((70, 80), np.uint8)
        center = rng.integers(20, 50, 2).tolist()
        cv2.circle(image, center, 14, rng.integers(150, 256, 3).tolist(), -1)
        cv2.circle(mask, center, 14, 1, -1)
        cv2.imwrite(str(root / 'images' / f'{index}.png'), image)
        cv2.imwrite(str(root / 'masks' / f'{index}.png'), mask)


def test_upernet_goes_the_whole_way(tmp_path, call):
    draw_disks(tmp_path / 'disks')
    # mmengine looks for `mmseg::` in a distribution of the original name.
    mmseg = Path(find_spec('mmseg').origin).parent / '.mim/configs'
    backbone = {**SMALL_SWIN, **SLA, 'type': 'mmdet.SLABSwin', '_delete_': True}
    config = CONFIG.replace('CONFIGS', str(CONFIGS)).replace('MMSEG', str(mmseg))
    (tmp_path / 'small.py').write_text(config.replace('BACKBONE', repr(backbone)))

    call('train.py', 'small.py', '--work-dir', 'run', '--data-root', 'disks')
    for model in (('small.py', 'run/iter_2.pth'), ('run/fused_config.py', 'run/fused.pth')):
        options = '--work-dir tested --report run/report.json --latency --rounds 2 --warmup 1'.split()
        assert '| mIoU' in call('test.py', *model, '--data-root', 'disks', *options).out
    unfused, fused = read_report('run/report.json')
    assert unfused.ap == fused.ap and 0 < unfused.ap['iou']['mIoU'] < 1
    assert fused.latency['median_ms'] > 0 and fused.latency['size'] == [64, 64]
    # UPerNet reads the outputs in a decode head, not in a neck.
    assert (fused.fusion['folded'], fused.fusion['affine']) == (16, 4), fused.fusion
    assert 0 < fused.fusion['difference']['float64'] < 1e-9
