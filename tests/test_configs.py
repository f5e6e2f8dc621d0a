"""Rows of a table differ in what the row names alone, and every config builds and loads the weights that it names."""

from __future__ import annotations

import gzip
import inspect
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.runner import Runner
from torch import nn

from slab_det.checkpoints import load_pretrained
from slab_det.norms import OfflineNorm

NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
MASK = [name for name in NAMES if name.startswith('mask')]
# What a row may change in the backbone of its LayerNorm row.
OF_ROWS = {'norm_cfg', 'out_norm_cfg', 'norm_eval', 'ffn_norm', 'attention', 'window_sizes', 'la_sr_ratios', 'init_cfg'}
OF_CSWIN = {'depths', 'drop_path_rate', 'stripe_widths'}
# What a detector's backbone may change in its classifier's.
OF_DETECTORS = {'type', 'init_cfg', 'out_indices', 'drop_path_rate', 'out_norm_cfg', 'norm_eval'}
# Released files whose keys and shapes tests/data has under another name.
MANIFESTS = {
    'swin_tiny_patch4_window7_224': 'microsoft_swin_tiny',
    'pvt_tiny': 'official_pvt_tiny',
    'pvt_small': 'official_pvt_small',
}


@pytest.fixture(autouse=True)
def _no_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here looks at a weight, and models of full size take longer to fill than to build."""
    monkeypatch.setattr(nn.init, 'kaiming_uniform_', lambda tensor, **options: nn.init.zeros_(tensor))


@cache
def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / f'{name}.py')


def layer_norm_row(name: str) -> str:
    detector, size, schedule = re.match(r'(\w+_rcnn_).*?(c?swin_[ts]|pvt_[ts])(_3x)?', name).groups('')
    return detector + size + schedule


def differing_keys(cfg: dict, other: dict) -> set[str]:
    return {key for key in {*cfg, *other} if cfg.get(key) != other.get(key)}


@pytest.mark.parametrize('name', NAMES)
def test_config_has_no_key_that_is_only_a_variable(name):
    # The keys of a runner, and the variables that mmdet's own base files leave.
    known = {*inspect.signature(Runner.__init__).parameters, 'auto_scale_lr', 'custom_imports'}
    known |= {'dataset_type', 'data_root', 'train_pipeline', 'test_pipeline', 'backend_args', 'vis_backends'}
    cfg = load(name)
    assert cfg.keys() <= known
    # A variable that is left says what the run does.
    for split in ('train', 'test'):
        variable, used = cfg[f'{split}_pipeline'], cfg[f'{split}_dataloader'].dataset.pipeline
        assert [{**step, '_scope_': None} for step in variable] == [{**step, '_scope_': None} for step in used], split


def test_long_schedule_is_mmdets_own_but_for_the_warm_up():
    theirs = Config.fromstring("_base_ = ['mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py']", '.py')
    ours = load('mask_rcnn_swin_t_3x')
    assert ours.optim_wrapper.optimizer == theirs.optim_wrapper.optimizer
    assert ours.train_cfg == theirs.train_cfg and ours.auto_scale_lr == theirs.auto_scale_lr
    assert {**ours.param_scheduler[1], '_scope_': 'mmdet'} == theirs.param_scheduler[1]
    assert ours.train_pipeline[3].transforms == theirs.train_pipeline[3].transforms, 'sizes and crops'
    for part in ('neck', 'rpn_head', 'roi_head', 'train_cfg', 'test_cfg'):
        assert ours.model[part] == {**theirs.model[part]}, part
    for key in ours.model.backbone.keys() & theirs.model.backbone.keys() - {'type', 'init_cfg'}:
        # A tuple and a list are the same.
        assert json.dumps(ours.model.backbone[key]) == json.dumps(theirs.model.backbone[key]), key


@pytest.mark.parametrize('name', [name for name in NAMES if 'rcnn' in name and 'quickstart' not in name])
def test_row_differs_from_its_layer_norm_row_in_norm_attention_start_and_hooks_alone(name):
    row, baseline = load(name).to_dict(), load(layer_norm_row(name)).to_dict()
    assert differing_keys(row, baseline) <= {'model', 'custom_hooks'}
    assert differing_keys(row['model'], baseline['model']) <= {'backbone'}
    allowed = OF_ROWS | (OF_CSWIN if 'cswin' in name else set())
    assert differing_keys(row['model']['backbone'], baseline['model']['backbone']) <= allowed


@pytest.mark.parametrize('name', [name for name in NAMES if name.startswith('faster')])
def test_both_detectors_of_a_row_differ_in_nothing_but_masks(name):
    faster, mask = load(name), load(name.replace('faster', 'mask'))
    assert all(mask.model[part] == faster.model[part] for part in ('backbone', 'neck', 'rpn_head'))
    for part in ('optim_wrapper', 'param_scheduler', 'train_cfg', 'default_hooks', 'custom_hooks'):
        assert mask.get(part) == faster.get(part), part
    assert mask.model.roi_head.mask_head and faster.model.roi_head.mask_head is None


@pytest.mark.parametrize('name', MASK)
def test_backbone_is_that_of_its_classifier_and_loads_the_weights_that_it_names(name):
    backbone_cfg = load(name).model.backbone
    row = name.removeprefix('mask_rcnn_').removesuffix('_official')
    # Its number of parameters is compared with the paper's in tests/e2e/test_pretrain.py.
    classifier = CONFIGS / 'pretrain' / f'{row}_in1k.py'
    if classifier.exists():
        changes = differing_keys(backbone_cfg, Config.fromfile(classifier).model.backbone)
        assert changes <= OF_DETECTORS
    backbone = MODELS.build(backbone_cfg)
    file = Path(backbone_cfg.init_cfg.checkpoint).stem
    with gzip.open(Path(__file__).parent / 'data' / 'checkpoint_manifests.json.gz') as manifests:
        shapes = json.load(manifests).get(MANIFESTS.get(file, file))
    if shapes is None:
        return
    report = load_pretrained(backbone, {key: torch.zeros(shape) for key, shape in shapes.items()})
    if 'flatten' in row:
        # Softmax has no position table of keys, no scale and no convolution; nothing takes its bias tables.
        assert all(re.search(r'positional_encoding|scale|dwc\.', key) for key in report.missing_unexpected)
        assert all(key.endswith('relative_position_bias_table') for key in report.unused_unexpected)
    elif 'ffnbn' in row:
        assert all('.ffn.norm.' in key for key in report.missing_unexpected) and not report.unused_unexpected
    else:
        assert report.complete, str(report)


SMALL_SWIN = dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
SMALL_PVT = dict(embed_dims=8, num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))


@pytest.mark.parametrize('norm', ['TokenBN', 'PRepBN'])
@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('SLABSwin', dict(ffn_norm='pre_act', **SMALL_SWIN)),
        ('SwinTransformer', SMALL_SWIN),
        ('SLABPVT', dict(norm_after_stage=True, **SMALL_PVT)),
        ('PyramidVisionTransformer', dict(norm_after_stage=True, **SMALL_PVT)),
        ('PyramidVisionTransformerV2', SMALL_PVT),
        ('SLABCSwin', dict(SMALL_SWIN, num_heads=(2, 2, 2, 4))),
    ],
)
def test_weight_decay_spares_all_norms_of_every_backbone_and_no_other_weight(kind, options, norm):
    backbone = MODELS.build(dict(type=kind, norm_cfg=dict(type=norm), **options))
    model = nn.ModuleDict(dict(backbone=backbone))
    optim_wrapper = Config.fromfile(CONFIGS / '_base_' / 'schedules' / 'adamw_1x.py').optim_wrapper
    optimizer = build_optim_wrapper(model, optim_wrapper).optimizer
    spared = {id(p) for group in optimizer.param_groups if group['weight_decay'] == 0 for p in group['params']}
    norms = [module for module in model.modules() if isinstance(module, (nn.LayerNorm, OfflineNorm))]
    expected = {id(p) for norm in norms for p in norm.parameters()}
    for name, parameter in model.named_parameters():
        is_expected = id(parameter) in expected or name.endswith(('relative_position_bias_table', 'absolute_pos_embed'))
        assert (id(parameter) in spared) == is_expected, name
