"""Fused detectors compute the same as unfused ones, for slab_det's and mmdet's backbones with every norm and option."""

import copy

import pytest
import torch
from conftest import FOUR_STAGE_PVT, as_trained, differing, random_sizes
from fusion_checks import SIZE, assert_fused_equals, left_affine, outputs
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

import slab_det
from slab_det.common.errors import CheckpointError
from slab_det.fusion import FusionError, save_fused, verify_fusion

SWIN = dict(type='SLABSwin')
STOCK_SWIN = dict(type='SwinTransformer', depths=(2, 2, 4, 2), window_size=7)
STOCK_PVT = dict(FOUR_STAGE_PVT, type='PyramidVisionTransformer')

# tests/test_fuzz.py draws the options of SLABSwin, SLABPVT and mmdet's backbones, with every norm; these it does not.
MODELS_WITH_OPTIONS = {
    'stock Swin, odd strides': dict(STOCK_SWIN, window_size=4, strides=(4, 2, 3, 2)),
    'CSWin': dict(type='SLABCSwin', num_heads=(2, 2, 4, 4)),
    'CSWin, linear stripes': dict(type='SLABCSwin', num_heads=(2, 2, 4, 4), attention='sla', pretrain_img_size=64),
}


@pytest.fixture
def detector_cfg(small_detector_cfg):
    """A function: the config of a small detector with the given backbone."""

    def build(backbone, detector='mask_rcnn', **neck):
        if 'num_layers' in backbone:
            cfg = small_detector_cfg(detector)
            cfg.backbone = copy.deepcopy(backbone)
            cfg.neck.in_channels = [8 * backbone['num_heads'][i] for i in sorted(backbone.get('out_indices', range(4)))]
        else:
            cfg = small_detector_cfg(detector, **backbone)
        cfg.neck.update(neck)
        if neck:
            cfg.rpn_head.anchor_generator.strides = [4, 8, 16, 32, 64][-cfg.neck.num_outs :]
        cfg.test_cfg.rpn.update(nms_pre=40, max_per_img=20)
        return cfg

    return build


@pytest.fixture
def build(detector_cfg):
    """A function: a detector whose every weight, bias, eta and statistic is random, in eval mode at gamma 0."""

    def build(*args, **neck):
        return as_trained(MODELS.build(detector_cfg(*args, **neck)))

    return build


@pytest.mark.parametrize('name', MODELS_WITH_OPTIONS)
def test_a_fused_detector_computes_the_same_in_float64(build, name):
    model = build(MODELS_WITH_OPTIONS[name], 'faster_rcnn').double()
    fused = slab_det.fuse(model)
    assert not left_affine(fused) and not fused.fusion_report.select('kept')
    assert not [m for m in fused.modules() if isinstance(m, nn.LayerNorm)]
    assert_fused_equals(fused, model, [SIZE, *random_sizes(1, seed=list(MODELS_WITH_OPTIONS).index(name))])


@pytest.mark.parametrize(
    ('maps', 'message'),
    [
        # The maps overflow in float32 alone; a difference of infinities is NaN.
        (lambda model, x: tuple(1e37 * y for y in model.extract_feat(x)), 'not finite'),
        (lambda model, x: (), 'no output'),
        (lambda model, x: (x[:0],), 'no output'),
    ],
    ids=['overflow', 'no map', 'an empty map'],
)
def test_verify_fusion_refuses_what_it_cannot_compare(small_detector, maps, message):
    model = small_detector()
    model.neck.lateral_convs[0].conv.weight.data *= 1e3
    with pytest.raises(FusionError, match=message):
        verify_fusion(model, slab_det.fuse(model), [torch.randn(1, 3, 45, 70)], maps)


@pytest.mark.parametrize(('dtype', 'names'), [(torch.float32, ['float64', 'float32']), (torch.float64, ['float64'])])
def test_verify_fusion_says_what_it_compared_in_which_dtype(small_detector, dtype, names):
    model = small_detector().to(dtype)
    checks = verify_fusion(model, slab_det.fuse(model), [torch.randn(1, 3, 45, 70, dtype=dtype)])
    assert [*checks] == names and all(check.same and check.num_values > 1000 for check in checks.values())
    assert 0 < checks['float64'].difference < 1e-12 and f'feature maps in {names[-1]}' in str(checks[names[-1]])
    # Float32 rounds a hundred million times more than float64.
    assert dtype == torch.float64 or 1e-8 < checks['float32'].rounding < 1e-4


def test_verify_fusion_refuses_a_model_that_differs(build):
    model = build(SWIN)
    fused = slab_det.fuse(model)
    with torch.no_grad():
        fused.backbone.stages[1].blocks[0].attn.w_msa.padding_qkv += 0.01
    with pytest.raises(FusionError, match='differs'):
        verify_fusion(model, fused, [torch.randn(1, 3, 45, 70)])


BLOCK, LAYER = 'backbone.stages.0.blocks.1', 'backbone.layers.0.1.1'


@pytest.mark.parametrize(
    ('backbone', 'num_norms', 'into'),
    [
        (
            dict(SWIN, ffn_norm='pre_act', norm_cfg=dict(type='UN')),
            # 1 patch embedding, 3 per block, 3 mergings, 4 outputs
            1 + 3 * 6 + 3 + 4,
            {
                f'{BLOCK}.norm1': (f'{BLOCK}.attn.w_msa.qkv',),
                f'{BLOCK}.ffn.norm': (f'{BLOCK}.ffn.layers.0.0',),
                'backbone.norm3': ('neck.lateral_convs.3.conv',),
            },
        ),
        (
            dict(FOUR_STAGE_PVT, norm_after_stage=True, ffn_norm='pre_act'),
            # 4 patch embeddings, 3 per block, 4 reductions, 4 after the stages
            4 + 3 * 5 + 4 + 4,
            {
                f'{LAYER}.norm1': (f'{LAYER}.attn.attn[q]', f'{LAYER}.attn.sr'),
                f'{LAYER}.attn.norm': (f'{LAYER}.attn.attn[kv]',),
                'backbone.layers.1.2': ('neck.lateral_convs.1.conv', 'backbone.layers.2.0.projection'),
            },
        ),
    ],
    ids=['Swin, pre_act', 'PVT'],
)
def test_the_report_names_every_layer_that_takes_a_norm(build, backbone, num_norms, into):
    model = build(backbone).double()
    fused = slab_det.fuse(model)
    report = fused.fusion_report
    found = {fusion.norm: fusion.into for fusion in report.norms}
    assert len(found) == len(report.select('folded')) == num_norms
    assert {norm: found[norm] for norm in into} == into
    assert_fused_equals(fused, model)


@pytest.mark.parametrize(
    ('backbone', 'neck', 'reasons'),
    [
        (backbone, neck, {template.format(level): reason})
        for backbone, template in (
            (SWIN, 'backbone.norm{}'),
            (dict(FOUR_STAGE_PVT, norm_after_stage=True), 'backbone.layers.{}.2'),
        )
        for neck, level, reason in (
            (dict(add_extra_convs='on_input', num_outs=5), 3, 'neck.fpn_convs.4 reads the same map'),
            (dict(start_level=1, num_outs=4), 0, 'the FPN does not read this level'),
        )
    ]
    + [
        (SWIN, dict(norm_cfg=dict(type='BN')), {}),
        (
            dict(STOCK_PVT, norm_after_stage=True, paddings=[0, 'corner', 0, 0]),
            {},
            {'backbone.layers.0.2': 'the next patch embedding pads the map'},
        ),
    ],
)
def test_an_output_norm_becomes_affine_if_one_reader_cannot_take_it(build, backbone, neck, reasons):
    model = build(backbone, **neck).double()
    fused = slab_det.fuse(model)
    assert left_affine(fused) == reasons
    assert_fused_equals(fused, model)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (nn.Module.train, r'model\.eval\(\)'),
        (lambda model: model.backbone.norm0.train(), r'model\.eval\(\)'),
        (
            lambda model: setattr(model.backbone.stages[1].blocks[0].norm2, 'gamma', 0.25),
            r'stages\.1\.blocks\.0\.norm2: gamma = 0\.25.*finish',
        ),
        (lambda model: model.backbone.norm2.repbn.running_var.fill_(float('nan')), r'backbone\.norm2: .*not finite'),
        (lambda model: setattr(model, 'extra', model.backbone.norm1), r'norm1: it is used 2 times'),
        (lambda model: model.backbone.norm1.repbn.register_forward_hook(print), r'norm1: it has hooks.*remove them'),
    ],
)
def test_fuse_refuses_what_it_cannot_fuse_and_changes_nothing(build, change, message):
    model = build(SWIN)
    change(model)
    before = [type(module) for module in model.modules()]
    with pytest.raises(FusionError, match=message):
        slab_det.fuse(model, inplace=True)
    assert [type(module) for module in model.modules()] == before and not hasattr(model, 'fusion_report')


def test_a_fused_model_refuses_other_weights_before_it_copies_any():
    cfg = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
    unfused, other = (as_trained(MODELS.build(dict(cfg, norm_cfg=dict(type='RepBN'))), seed) for seed in (0, 1))
    fused, source = slab_det.fuse(unfused), slab_det.fuse(other)
    before = copy.deepcopy(fused.state_dict())
    incomplete = {key: value for key, value in source.state_dict().items() if 'reduction' not in key}
    for state in (other.state_dict(), incomplete):
        for strict in (True, False):
            with pytest.raises(CheckpointError):
                fused.load_state_dict(state, strict=strict)
            assert not differing(fused, before)
    fused.load_state_dict(source.state_dict())
    assert not differing(fused, source)


def test_a_saved_fused_detector_is_rebuilt_from_its_config(tmp_path, build, detector_cfg):
    backbone = dict(STOCK_SWIN, qkv_bias=False)
    fused, cfg = slab_det.fuse(build(backbone)), detector_cfg(backbone)
    cfg.backbone.init_cfg = dict(type='Pretrained', checkpoint='not/there.pth')
    checkpoint, config = save_fused(fused, Config(dict(model=cfg)), tmp_path / 'fused.pth')
    rebuilt = MODELS.build(Config.fromfile(config).model)
    rebuilt.init_weights()
    state = torch.load(checkpoint, weights_only=True)['state_dict']
    assert state.keys() == rebuilt.state_dict().keys()
    assert any(key.endswith('padding_qkv') for key in state)
    rebuilt.load_state_dict(state)
    assert not any(module.training for module in rebuilt.modules())
    images = torch.randn(1, 3, 99, 85)
    for found, reference in zip(outputs(rebuilt, images), outputs(fused, images), strict=True):
        assert torch.equal(found, reference)
