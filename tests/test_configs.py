"""Every config builds the row it is named after, trains by that row's recipe, and ends with the norms that it says."""

from __future__ import annotations

import gzip
import inspect
import json
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import slab_det
from slab_det.checkpoints import load_pretrained
from slab_det.norms import OfflineNorm

ROWS = [f'{norm}{family}_{size}' for norm in ('', 'prepbn_') for family in ('swin', 'pvt') for size in 'ts']
ROWS += ['slab_swin_t', 'slab_swin_s', 'slab_pvt_t', 'flatten_swin_t']
# The rows of UN's tables, and the one that stands beside them: 36 epochs.
NO_LAYER_NORM = {
    'bn_swin_t_3x': 'TokenBN',
    'mabn_swin_t_3x': 'MABN',
    'powernorm_swin_t_3x': 'PowerNorm',
    'un_swin_t_3x': 'UN',
    'bn_ffnbn_swin_t_3x': 'TokenBN',
}
LONG = ['swin_t_3x', *NO_LAYER_NORM]
ROWS += LONG
OFFICIAL = ['prepbn_swin_t_official', 'slab_swin_t_official']
CSWIN = ['cswin_t', 'slab_cswin_t']
# UN prints both detectors of its rows; the bases of docs/your-dataset.md have both too.
FASTER = ['swin_t', 'prepbn_swin_t', *LONG]
COCO = [f'mask_rcnn_{row}' for row in ROWS + OFFICIAL + CSWIN] + [f'faster_rcnn_{row}' for row in FASTER]
QUICKSTART = [f'quickstart_mask_rcnn_{name}' for name in ('swin', 'slab_swin', 'bn_ffnbn_swin')]

# What the papers print for their classifiers at 224, in millions of parameters and G multiply-adds.
PUBLISHED = {
    'swin_t': ('28', '4.5'),
    'swin_s': ('50', '8.7'),
    'pvt_t': ('13.2', '1.9'),
    'pvt_s': ('24.5', '3.8'),
}
SWIN = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0'
PVT = 'https://github.com/whai362/PVT/releases/download/v2'
SLAB = 'https://github.com/xinghaochen/SLAB/releases/download/ckpts'
# What the READMEs of the four repositories link to.
RELEASED = {
    **{f'swin_{name[0]}': f'{SWIN}/swin_{name}_patch4_window7_224.pth' for name in ('tiny', 'small')},
    **{f'pvt_{name[0]}': f'{PVT}/pvt_{name}.pth' for name in ('tiny', 'small')},
    **{f'prepbn_pvt_{name[0]}': f'{SLAB}/pvt_{name}_prepbn.pth' for name in ('tiny', 'small')},
    'prepbn_swin_t': f'{SLAB}/swin_tiny_prepbn.pth',
    'slab_swin_t': f'{SLAB}/slab_swin_tiny.pth',
    'slab_swin_s': f'{SLAB}/slab_swin_small.pth',
    'slab_pvt_t': f'{SLAB}/slab_pvt_tiny.pth',
    'cswin_t': 'https://github.com/microsoft/CSWin-Transformer/releases/download/v0.1.0/cswin_tiny_224.pth',
    'slab_cswin_t': f'{SLAB}/slab_cswin_tiny.pth',
}
# Keys and shapes of those that we know.
MANIFESTS = {
    f'{SWIN}/swin_tiny_patch4_window7_224.pth': 'microsoft_swin_tiny',
    f'{PVT}/pvt_tiny.pth': 'official_pvt_tiny',
    f'{PVT}/pvt_small.pth': 'official_pvt_small',
    f'{SLAB}/swin_tiny_prepbn.pth': 'swin_tiny_prepbn',
    f'{SLAB}/slab_swin_tiny.pth': 'slab_swin_tiny',
    f'{SLAB}/slab_pvt_tiny.pth': 'slab_pvt_tiny',
    f'{SLAB}/slab_cswin_tiny.pth': 'slab_cswin_tiny',
}


@pytest.fixture(autouse=True)
def _no_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here looks at a weight, and models of full size take longer to fill than to build."""
    monkeypatch.setattr(nn.init, 'kaiming_uniform_', lambda tensor, **options: nn.init.zeros_(tensor))


@cache
def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / f'{name}.py')


def row_of(name: str) -> str:
    return name.partition('_rcnn_')[2]


def size_of(row: str) -> str:
    return '_'.join(row.removesuffix('_official').removesuffix('_3x').split('_')[-2:])


def has_progressive_norms(name: str) -> bool:
    return 'prepbn' in name or 'slab' in name


def has_no_layer_norm(name: str) -> bool:
    return row_of(name) in {*NO_LAYER_NORM, 'bn_ffnbn_swin'}


def has_offline_norms(name: str) -> bool:
    return has_progressive_norms(name) or has_no_layer_norm(name)


def count_norms(backbone: dict) -> int:
    """By hand: Swin has one norm after its patches, two per block, three of merging, four outputs; PVT one after each
    stage's patches, two per block and one per block that reduces its keys; CSWin that and four outputs."""
    if backbone.type == 'SLABPVT':
        reducing = 0 if backbone.get('attention') == 'sla' else sum(backbone.num_layers[:3])
        return 4 + 2 * sum(backbone.num_layers) + reducing
    if backbone.type == 'SLABCSwin':
        return 4 + 2 * sum(backbone.depths) + 4
    return 1 + (3 if backbone.get('ffn_norm') else 2) * sum(backbone.depths) + 3 + 4


def test_every_row_has_its_detectors():
    assert sorted(path.stem for path in CONFIGS.glob('*.py')) == sorted(COCO + QUICKSTART)


@pytest.mark.parametrize('name', COCO + QUICKSTART)
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


# One Faster R-CNN stands for all: see test_both_detectors_of_a_row_differ_in_nothing_but_masks.
@pytest.mark.parametrize(
    'name', [name for name in COCO + QUICKSTART if 'faster' not in name] + ['faster_rcnn_prepbn_swin_t']
)
def test_config_ends_with_the_norms_it_says(name):
    cfg = load(name)
    model = MODELS.build(cfg.model).eval()
    assert type(model).__name__ == ('FasterRCNN' if name.startswith('faster') else 'MaskRCNN')
    hooks = [hook.type for hook in cfg.get('custom_hooks', [])]
    assert ('ProgressiveNormHook' in hooks) == has_progressive_norms(name)
    assert ('RecalibrateFuseHook' in hooks) == has_offline_norms(name)
    eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    assert eps == (set() if has_no_layer_norm(name) else {1e-6} if 'pvt' in name else {1e-5})
    slab_det.set_gamma(model, 0)
    report = slab_det.fuse(model, inplace=True).fusion_report
    assert not report.select('affine') and len(report.norms) == count_norms(cfg.model.backbone)
    kept = [fusion.norm for fusion in report.select('kept')]
    if not has_offline_norms(name):
        assert len(kept) == len(report.norms)
    elif name.endswith('official'):
        assert kept == [f'backbone.norm{i}' for i in range(4)]
    else:
        assert not kept
        assert not [m for m in model.modules() if isinstance(m, (OfflineNorm, nn.LayerNorm))]


@pytest.mark.parametrize('name', COCO)
def test_coco_configs_follow_the_papers_recipe(name):
    cfg, row = load(name), row_of(name)
    size, is_long, is_pvt = size_of(row), row in LONG, 'pvt' in row
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-4, 0.05)
    assert 'momentum' not in optimizer
    assert cfg.train_cfg.max_epochs == cfg.param_scheduler[1].end == (36 if is_long else 12)
    assert cfg.param_scheduler[0].end == 500
    assert cfg.param_scheduler[1].milestones == ([27, 33] if is_long else [8, 11])
    assert cfg.auto_scale_lr.base_batch_size == 16
    assert cfg.train_dataloader.dataset.data_root == 'data/coco/'
    transforms = {transform.type: transform for transform in cfg.train_dataloader.dataset.pipeline}
    assert transforms['LoadAnnotations'].get('with_mask', False) == name.startswith('mask')
    assert cfg.val_evaluator.metric == (['bbox', 'segm'] if name.startswith('mask') else 'bbox')
    if is_pvt:
        assert tuple(transforms['Resize'].scale) == (1333, 800) and 'RandomChoice' not in transforms
    else:
        sides = [scale[0] for scale in transforms['RandomChoice'].transforms[0][0].scales]
        assert sides == list(range(480, 801, 32)) and 'Resize' not in transforms
        drop_path = {'swin_t': 0.2 if is_long else 0.1, 'swin_s': 0.2, 'cswin_t': 0.2}[size]
        drop_path = 0.1 if row == 'slab_cswin_t' else drop_path
        assert cfg.model.backbone.drop_path_rate == drop_path
    if has_progressive_norms(name) and not name.endswith('official'):
        hook = cfg.custom_hooks[0]
        assert (hook.type, hook.decay, hook.total, hook.unit) == ('ProgressiveNormHook', 'linear', 0.8, 'fraction')


@pytest.mark.parametrize(('row', 'norm'), NO_LAYER_NORM.items())
def test_rows_of_un_differ_from_layer_norm_in_nothing_but_the_norm(row, norm):
    changed, baseline = load(f'mask_rcnn_{row}').to_dict(), load('mask_rcnn_swin_t_3x').to_dict()
    backbone = changed['model']['backbone']
    # BN+FFNBN has one more norm in each FFN.
    assert backbone.pop('ffn_norm', None) == ('pre_act' if row.startswith('bn_ffnbn') else None)
    assert (backbone.pop('norm_cfg')['type'], baseline['model']['backbone'].pop('norm_cfg')) == (norm, {'type': 'LN'})
    # All its norms, those of the outputs too.
    norms = [m for m in MODELS.build(load(f'mask_rcnn_{row}').model.backbone).modules() if isinstance(m, OfflineNorm)]
    assert {type(module).__name__ for module in norms} == {norm}
    if norm == 'UN':
        # Of its paper.
        assert (norms[0].window_size, norms[0].warmup_iters, norms[0].filter_outliers) == (4, 4000, True)
    for key in baseline:
        assert changed[key] == baseline[key], key
    # The hooks that the norm needs.
    assert set(changed) - set(baseline) == {'custom_hooks'}


def test_both_detectors_of_a_row_differ_in_nothing_but_masks():
    for row in FASTER:
        mask, faster = load(f'mask_rcnn_{row}'), load(f'faster_rcnn_{row}')
        assert all(mask.model[part] == faster.model[part] for part in ('backbone', 'neck', 'rpn_head')), row
        for part in ('optim_wrapper', 'param_scheduler', 'train_cfg', 'default_hooks', 'custom_hooks'):
            assert mask.get(part) == faster.get(part), (row, part)
        assert faster.model.roi_head.mask_head is None


@pytest.mark.parametrize('row', ROWS + OFFICIAL + CSWIN)
def test_config_names_weights_that_were_released_and_fit(row):
    backbone_cfg = load(f'mask_rcnn_{row}').model.backbone
    row = row.removesuffix('_official').removesuffix('_3x')
    url = backbone_cfg.init_cfg.checkpoint
    # Where a row has none of its own, LayerNorm weights of its size are its start.
    assert url == RELEASED.get(row, RELEASED[size_of(row)])
    if url not in MANIFESTS:
        return
    with gzip.open(Path(__file__).parent / 'data' / 'checkpoint_manifests.json.gz') as file:
        shapes = json.load(file)[MANIFESTS[url]]
    backbone = MODELS.build(backbone_cfg)
    report = load_pretrained(backbone, {key: torch.zeros(shape) for key, shape in shapes.items()})
    if row == 'flatten_swin_t':
        # Softmax has no position table of keys, no scale and no convolution; its bias tables have no place.
        assert {key.rpartition('attn.w_msa.')[2] for key in report.missing_unexpected} == {
            'positional_encoding',
            'scale',
            'dwc.weight',
            'dwc.bias',
        }
        assert all(key.endswith('relative_position_bias_table') for key in report.unused_unexpected)
    elif row == 'bn_ffnbn_swin_t':
        assert all('.ffn.norm.' in key for key in report.missing_unexpected) and not report.unused_unexpected
    else:
        assert report.complete, str(report)


# Without the rows of UN that differ from swin_t_3x in the norm alone; BN+FFNBN has more norms.
SIZED = [row for row in ROWS if row not in NO_LAYER_NORM or row.startswith('bn_ffnbn')]


@pytest.mark.parametrize('row', SIZED)
def test_number_of_parameters_is_that_of_the_papers(row):
    backbone = load(f'mask_rcnn_{row}').model.backbone
    size = size_of(row)
    count = count_parameters(row)
    if row in PUBLISHED:
        # They print classifiers: one more linear layer.
        classifier = 1000 * ({'pvt_t': 512, 'pvt_s': 512}.get(size, 768) + 1)
        printed = PUBLISHED[size][0]
        decimals = len(printed.partition('.')[2])
        assert f'{(count + classifier) / 1e6:.{decimals}f}' == printed
        return
    expected = count_parameters(size)
    if 'slab' in row or 'flatten' in row:
        if backbone.type == 'SLABPVT':
            # A position per token of each stage in two blocks each, and no convolution that reduces the keys.
            expected += 2 * sum(side**2 * dim for side, dim in ((56, 64), (28, 128), (14, 320), (7, 512)))
            expected -= 2 * sum((dim * ratio) ** 2 for dim, ratio in ((64, 8), (128, 4), (320, 2)))
        else:
            # One per slot in four windows, where softmax attention has 169 per head.
            expected += 2 * 56**2 * 96 + 2 * 28**2 * 192
    # What is left are the parameters of the norms and of the 5x5 convolutions of values.
    assert count == pytest.approx(expected, rel=0.003)


@cache
def count_parameters(row: str) -> int:
    return sum(p.numel() for p in MODELS.build(load(f'mask_rcnn_{row}').model.backbone).parameters())


@pytest.mark.parametrize('row', [row for row in SIZED if 'slab' not in row and 'flatten' not in row])
def test_multiply_adds_at_224_round_to_what_the_papers_print(row):
    backbone_cfg = load(f'mask_rcnn_{row}').model.backbone
    backbone = MODELS.build(backbone_cfg).eval()
    slab_det.set_gamma(backbone, 0)
    # Counted, not computed.
    backbone.to('meta')
    # Only the plain kernel is made of products that the counter sees.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        backbone(torch.zeros(1, 3, 224, 224, device='meta'))
    count = counter.get_total_flops() // 2
    if backbone_cfg.type == 'SLABPVT':
        # They print classifiers: the class token is a 50th token in the last stage.
        count += backbone_cfg.num_layers[3] * (12 * 512**2 + 2 * 512 * (50**2 - 49**2)) + 512 * 1000
    assert f'{count / 1e9:.1f}' == PUBLISHED[size_of(row)][1]


SMALL_SWIN = dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
SMALL_PVT = dict(embed_dims=8, num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), norm_after_stage=True)
SMALL_PVT_V2 = dict(embed_dims=8, num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))


@pytest.mark.parametrize(
    ('schedule', 'norm'), [('adamw_1x', 'LN'), ('adamw_1x', 'TokenBN'), ('finetune_prepbn', 'PRepBN')]
)
@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('SLABSwin', SMALL_SWIN),
        ('SLABSwin', dict(ffn_norm='pre_act', **SMALL_SWIN)),
        ('SwinTransformer', SMALL_SWIN),
        ('SLABPVT', SMALL_PVT),
        ('PyramidVisionTransformer', SMALL_PVT),
        ('PyramidVisionTransformerV2', SMALL_PVT_V2),
        ('SLABCSwin', dict(SMALL_SWIN, num_heads=(2, 2, 2, 4))),
    ],
)
def test_weight_decay_spares_all_norms_of_every_backbone_and_no_other_weight(kind, options, norm, schedule):
    backbone = MODELS.build(dict(type=kind, norm_cfg=dict(type=norm), **options))
    model = nn.ModuleDict(dict(backbone=backbone))
    optim_wrapper = Config.fromfile(CONFIGS / '_base_' / 'schedules' / f'{schedule}.py').optim_wrapper
    optimizer = build_optim_wrapper(model, optim_wrapper).optimizer
    spared = {id(p) for group in optimizer.param_groups if group['weight_decay'] == 0 for p in group['params']}
    norms = [module for module in model.modules() if isinstance(module, (nn.LayerNorm, OfflineNorm))]
    expected = {id(p) for norm in norms for p in norm.parameters()}
    for name, parameter in model.named_parameters():
        is_expected = id(parameter) in expected or name.endswith(('relative_position_bias_table', 'absolute_pos_embed'))
        assert (id(parameter) in spared) == is_expected, name


def test_weight_decay_spares_nothing_in_pvt():
    cfg = load('mask_rcnn_prepbn_pvt_t')
    groups = build_optim_wrapper(MODELS.build(cfg.model), cfg.optim_wrapper).optimizer.param_groups
    assert all(group['weight_decay'] > 0 for group in groups)
