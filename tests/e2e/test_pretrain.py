"""Classifiers of mmpretrain go the way of detectors: training, recalibration, fusion, test, report."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import CONFIGS, NEEDS_MMPRETRAIN, differing
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope

from slab_det.checkpoints import load_pretrained
from slab_det.measure.report_file import ReportEntry, read_report

pytestmark = NEEDS_MMPRETRAIN
FOLDER = CONFIGS / 'pretrain'
# Millions of parameters as the papers of Swin, PVT (which has DeiT too) and T2T-ViT print them. Those of CSWin are of
# Microsoft's code; the README of CSWin rounds them to 23M and 35M. tests/measure/test_cost.py has multiply-adds.
PUBLISHED = dict(
    swin_t='28',
    swin_s='50',
    pvt_t='13.2',
    pvt_s='24.5',
    deit_t='5.7',
    deit_s='22.1',
    t2t_vit_14='21.5',
    cswin_t='22.320552',
    cswin_s='34.643304',
)
ROWS = sorted(path.stem.removesuffix('_in1k') for path in FOLDER.glob('*.py'))


@cache
def load(row: str) -> Config:
    return Config.fromfile(FOLDER / f'{row}_in1k.py')


def size_of(row: str) -> str:
    """The LayerNorm row that a row is compared with."""
    return re.search('(t2t_vit|c?swin|pvt|deit)_[^_]+', row)[0]


@pytest.mark.parametrize('row', ROWS)
def test_classifier_has_the_hooks_of_its_norm_and_else_the_recipe_of_its_layer_norm_row(row):
    cfg, baseline = load(row).to_dict(), load(size_of(row)).to_dict()
    norm = cfg['model']['backbone'].get('norm_cfg', dict(type='LN'))['type']
    hooks = {hook['type'] for hook in cfg.get('custom_hooks', [])}
    assert ('RecalibrateFuseHook' in hooks) == (norm != 'LN')
    assert ('ProgressiveNormHook' in hooks) == (norm == 'PRepBN')
    assert {key for key in {*cfg, *baseline} if cfg.get(key) != baseline.get(key)} <= {'model', 'custom_hooks'}


@pytest.mark.parametrize('row', [*PUBLISHED, 'prepbn_swin_t', 'prepbn_pvt_t', 'prepbn_deit_t', 'un_t2t_vit_14'])
def test_classifier_has_the_published_size_and_its_vectors_do_not_decay(row, monkeypatch):
    # Models of full size take longer to fill than to build.
    monkeypatch.setattr(torch.nn.init, 'kaiming_uniform_', lambda tensor, **options: torch.nn.init.zeros_(tensor))
    init_default_scope('mmpretrain')
    cfg = load(row)
    model = MODELS.build(cfg.model)
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    decays = {id(parameter): group['weight_decay'] > 0 for group in groups for parameter in group['params']}
    for name, parameter in model.named_parameters():
        is_spared = parameter.ndim < 2 or re.search('bias_table|cls_token|positions.pos_embed', name)
        assert decays[id(parameter)] == (not is_spared), name

    parameters, printed = sum(parameter.numel() for parameter in model.parameters()), PUBLISHED[size_of(row)]
    assert f'{parameters / 1e6:.{len(printed.partition(".")[2])}f}' == printed


def draw_classes(root: Path) -> None:
    """Dark and light noise, 64x64, 16 images to train on and 8 to test on."""
    rng = np.random.default_rng(0)
    for split, count in (('train', 8), ('val', 4)):
        for name, level in (('dark', 0), ('light', 100)):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                image = rng.integers(level, level + 100, (64, 64, 3), dtype=np.uint8)
                cv2.imwrite(str(root / split / name / f'{index}.png'), image)


def shrink(cfg: Config) -> Config:
    """The twin of a config: fewer channels, blocks, pixels and epochs; all else is the config's own."""
    backbone = cfg.model.backbone
    backbone.update(embed_dims=8, pretrain_img_size=64)
    if 'T2T' in backbone.get('model', backbone).type:
        del backbone.embed_dims, backbone.pretrain_img_size
        backbone.model.update(img_size=64, embed_dims=64, num_layers=2, t2t_cfg=dict(token_dims=8))
        backbone.model.layer_cfgs = dict(num_heads=4, feedforward_channels=64)
    elif 'PVT' in backbone.type:
        backbone.update(num_layers=(1, 1, 1, 1))
    else:
        backbone.update(embed_dims=64, num_heads=4, num_layers=2)
    cfg.model.head.update(num_classes=2, in_channels=64)
    cfg.data_preprocessor.num_classes = 2
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        for transform in loader.dataset.pipeline:
            transform.update({key: value * 2 // 7 for key, value in transform.items() if key in ('scale', 'crop_size')})
        loader.update(batch_size=8, num_workers=0)
        folder = 'train' if split == 'train' else 'val'
        loader.dataset = dict(
            type='CustomDataset', data_root='nowhere', data_prefix=folder, pipeline=loader.dataset.pipeline
        )
    cfg.val_evaluator.topk = cfg.test_evaluator.topk = (1,)
    cfg.train_cfg.max_epochs = 3
    cfg.param_scheduler = None
    cfg.default_hooks.logger.interval = 1
    return cfg


@pytest.fixture
def train(tmp_path: Path, call: Callable) -> Callable[[Config], ReportEntry]:
    """A function: trains the config in run/ on the images in data/, and returns the report of the fused classifier."""
    draw_classes(tmp_path / 'data')

    def run(cfg: Config) -> ReportEntry:
        cfg.dump(tmp_path / 'small.py')
        call('train.py', 'small.py', '--work-dir', 'run', '--data-root', 'data')
        unfused, fused = read_report('run/report.json')
        assert unfused.ap['accuracy']['top1'] in [count / 8 for count in range(9)]
        assert 0 < fused.fusion['difference']['float64'] < 1e-9 and fused.fusion['kept'] == 0
        return fused

    return run


def load_state(path: str) -> dict:
    return torch.load(path, weights_only=False)['state_dict']


@pytest.mark.parametrize(('row', 'affine'), [('prepbn_pvt_t', 0), ('slab_deit_t', 1)])
def test_classifier_is_trained_and_fused_and_starts_a_detector(row, affine, train):
    fused = train(shrink(Config.fromfile(FOLDER / f'{row}_in1k.py')))
    assert fused.fusion['affine'] == affine
    # The detector has the output norms of four stages where there are stages.
    detector = Config.fromfile('small.py').model.backbone
    detector.init_cfg = dict(type='Pretrained', checkpoint='run/epoch_3.pth')
    if 'out_indices' in detector:
        detector.out_indices = (0, 1, 2, 3)
    backbone = MODELS.build(detector)
    assert load_pretrained(backbone, 'run/epoch_3.pth').complete
    backbone.init_weights()
    loaded = backbone.state_dict()
    trained = {key.removeprefix('backbone.'): value for key, value in load_state('run/epoch_3.pth').items()}
    for key in trained.keys() - {'head.fc.weight', 'head.fc.bias'}:
        assert torch.equal(loaded[key], trained[key]), key


def test_every_command_takes_a_classifier(train, call):
    assert train(shrink(Config.fromfile(FOLDER / 'un_t2t_vit_14_in1k.py'))).fusion['affine'] == 1
    for model in (('small.py', 'run/epoch_3.pth'), ('run/fused_config.py', 'run/fused.pth')):
        options = '--work-dir tested --report run/report.json --latency --rounds 2 --warmup 1'.split()
        out = call('test.py', *model, '--data-root', 'data', *options).out
        # EMAHook would swap in the statistics of before the recalibration.
        assert '| top-1 accuracy / top5 |' in out and 'EMAHook' not in out
    unfused, fused = read_report('run/report.json')
    assert unfused.ap == fused.ap and fused.latency['median_ms'] > 0 and fused.latency['size'] == [64, 64]
    table = call('report.py', 'run/report.json', '--out', 'table').out
    assert 'accuracy on data/val (8 images); trained seed' in table
    assert 'top-1 accuracy' in Path('table/ap_latency.svg').read_text()

    # With the mean and deviation of the images that stand beside the model, a second recalibration finds the same.
    call('recalibrate.py', 'small.py', 'run/epoch_3.pth', '--out', 'again.pth', '--data-root', 'data')
    assert not differing(load_state('run/epoch_3.pth'), load_state('again.pth'))
    call('fuse.py', 'small.py', 'run/epoch_3.pth', '--out', 'fused_again.pth')
    refused = call('test.py', 'small.py', 'run/epoch_3.pth', '--data-root', 'data', '--show-dir', 'drawn', code=1)
    assert '--show-dir are for detectors' in refused.err
