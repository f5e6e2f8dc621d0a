"""SLABPVT and mmdet's stock PVT and PVTv2 in a detector: training, recalibration and exact fusion."""

import numpy as np
import pytest
import torch
from conftest import randomize, raw_outputs
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.structures import InstanceData
from torch import nn

import slab_det
from slab_det.fusion import save_fused
from slab_det.fusion.verify import verify_fusion
from slab_det.norms import ChannelAffine, OfflineNorm

HEADS = (1, 2, 3, 4)
SMALL = dict(
    embed_dims=8,
    num_layers=(2, 1, 2, 1),
    num_heads=HEADS,
    mlp_ratios=(3, 2, 2, 2),
    sr_ratios=(4, 2, 2, 1),
    pretrain_img_size=64,
)
V2 = dict(
    patch_sizes=[7, 3, 3, 3], paddings=[3, 1, 1, 1], use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True
)
STOCK = [dict(type='PyramidVisionTransformer'), dict(type='PyramidVisionTransformerV2')]
OURS = {
    'softmax': {},
    'sla': dict(attention='sla'),
    'focused': dict(attention='focused'),
    'mixed': dict(attention=('sla', 'focused', 'softmax', 'sla'), la_sr_ratios=(2, 2, 1, 1)),
    'norm_after_stage': dict(norm_after_stage=True, attention=('sla', 'softmax', 'softmax', 'focused')),
    'qkv_bias=False': dict(qkv_bias=False, attention=('sla', 'softmax', 'softmax', 'softmax')),
    'pre_act': dict(ffn_norm='pre_act'),
    'post_act': dict(ffn_norm='post_act', attention='sla'),
    'V2': V2,
    'V2, sla': dict(V2, attention='sla', qkv_bias=False),
}
PADDED = 'an affine map folds only into a convolution with groups=1 and padding=0'


@pytest.fixture
def pvt_detector_cfg(small_detector_cfg):
    def build(**backbone):
        cfg = small_detector_cfg()
        cfg.backbone = {'type': 'SLABPVT', 'norm_cfg': dict(type='PRepBN', ln_eps=1e-6), **SMALL, **backbone}
        cfg.neck.in_channels = [8 * HEADS[i] for i in sorted(backbone.get('out_indices', range(4)))]
        cfg.test_cfg.rpn.update(nms_pre=40, max_per_img=20)
        return cfg

    return build


@pytest.fixture
def pvt_detector(pvt_detector_cfg):
    """A function: a detector whose every weight, bias, eta and statistic is random, in eval mode at gamma 0."""

    def build(seed=0, **backbone):
        model = MODELS.build(pvt_detector_cfg(**backbone))
        randomize(model, seed)
        slab_det.set_gamma(model, 0)
        return model.eval()

    return build


def sizes(count, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(64, 200, (count, 2), generator=generator)
    return (drawn + (drawn % 32 == 0)).tolist()


def assert_fused_equals(fused, model, count=4, seed=1):
    for i, size in enumerate(sizes(count, seed)):
        images = torch.randn(1 + i % 2, 3, *size).double()
        outputs, references = raw_outputs(fused, images), raw_outputs(model, images)
        assert len(references) == len(images) + 3
        for output, reference in zip(outputs, references, strict=True):
            difference = (output - reference).abs().max() / reference.abs().max()
            assert difference <= 1e-9, (size, difference.item())


def left_after_stages(fused):
    """What is not folded: nothing, or the norms between stages where the next patch embedding pads."""
    assert not [m for m in fused.modules() if isinstance(m, OfflineNorm | nn.LayerNorm)]
    left = {fate.norm: fate.reason for fate in fused.fusion_report.norms if fate.fate != 'folded'}
    affine = [name for name, m in fused.named_modules() if isinstance(m, ChannelAffine)]
    assert sorted(left) == sorted(affine)
    return left


def expected_left(backbone):
    if not (backbone['type'].endswith('V2') or 'paddings' in backbone):
        return {}
    return {f'backbone.layers.{i}.2': f'backbone.layers.{i + 1}.0.projection: {PADDED}' for i in range(3)}


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN', 'PRepBN', 'UN', 'MABN', 'PowerNorm'])
@pytest.mark.parametrize('backbone', STOCK, ids=lambda backbone: backbone['type'])
def test_stock_pvt_fuses_exactly(pvt_detector, backbone, norm):
    model = pvt_detector(**backbone, norm_cfg=dict(type=norm)).double()
    fused = slab_det.fuse(model)
    assert left_after_stages(fused) == expected_left(backbone)
    assert_fused_equals(fused, model, count=2)


@pytest.mark.parametrize('options', OURS)
def test_slab_pvt_fuses_exactly(pvt_detector, options):
    model = pvt_detector(**OURS[options]).double()
    fused = slab_det.fuse(model)
    assert left_after_stages(fused) == expected_left(dict(OURS[options], type='SLABPVT'))
    assert_fused_equals(fused, model)


@pytest.mark.parametrize('options', ['mixed', 'norm_after_stage', 'V2'])
def test_fused_features_keep_law_1_in_float32(pvt_detector, options):
    model = pvt_detector(**OURS[options])
    check = verify_fusion(model, slab_det.fuse(model), [torch.randn(2, 3, *size) for size in sizes(4, seed=2)])
    assert check.exact, check


def test_report_names_every_layer_that_takes_a_norm(pvt_detector):
    report = slab_det.fuse(pvt_detector(norm_after_stage=True, ffn_norm='pre_act')).fusion_report
    into = {fate.norm: fate.into for fate in report.norms}
    # 4 patch embeddings, 3 per block, 5 reductions, 4 after the stages
    assert len(into) == 4 + 3 * 6 + 5 + 4
    block = 'backbone.layers.0.1.1'
    assert into['backbone.layers.0.0.norm'] == 'backbone.layers.0.0.projection'
    assert into[f'{block}.norm1'] == f'{block}.attn.attn[q], {block}.attn.sr'
    assert into[f'{block}.attn.norm'] == f'{block}.attn.attn[kv]'
    assert into[f'{block}.norm2'] == into[f'{block}.ffn.norm'] == f'{block}.ffn.layers.0'
    assert into['backbone.layers.3.1.1.norm1'] == 'backbone.layers.3.1.1.attn.attn[qkv]'
    assert into['backbone.layers.1.2'] == 'neck.lateral_convs.1.conv, backbone.layers.2.0.projection'
    assert into['backbone.layers.3.2'] == 'neck.lateral_convs.3.conv'
    report = slab_det.fuse(pvt_detector(ffn_norm='post_act', attention='sla')).fusion_report
    into = {fate.norm: fate.into for fate in report.norms}
    assert into[f'{block}.ffn.norm'] == f'{block}.ffn.layers.3'
    assert into[f'{block}.norm1'] == f'{block}.attn.attn[qkv]'


@pytest.mark.parametrize('kind', ['SLABPVT', 'PyramidVisionTransformer'])
def test_a_norm_after_a_stage_that_is_no_output_folds_into_the_next_stage_alone(pvt_detector, kind):
    model = pvt_detector(type=kind, norm_after_stage=True, out_indices=(3, 1)).double()
    fused = slab_det.fuse(model)
    into = {fate.norm: fate.into for fate in fused.fusion_report.norms}
    assert [into[f'backbone.layers.{i}.2'] for i in range(4)] == [
        'backbone.layers.1.0.projection',
        'neck.lateral_convs.0.conv, backbone.layers.2.0.projection',
        'backbone.layers.3.0.projection',
        'neck.lateral_convs.1.conv',
    ]
    assert_fused_equals(fused, model, count=2)


def test_a_bare_backbone_keeps_the_norms_of_its_outputs(pvt_detector):
    backbone = pvt_detector(norm_after_stage=True, out_indices=(0, 2)).double().backbone
    fused = slab_det.fuse(backbone)
    left = {fate.norm: fate.reason for fate in fused.fusion_report.select('affine')}
    assert list(left) == ['layers.0.2', 'layers.2.2', 'layers.3.2']
    x = torch.randn(2, 3, 75, 110).double()
    with torch.no_grad():
        for ours, theirs in zip(fused(x), backbone(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    'neck, levels, reason',
    [
        (dict(add_extra_convs='on_input', num_outs=5), [3], 'reads the same map'),
        (dict(start_level=1, num_outs=4), [0], 'does not read this level'),
    ],
)
def test_a_norm_with_one_reader_that_cannot_take_it_stays_whole(pvt_detector_cfg, neck, levels, reason):
    cfg = pvt_detector_cfg(norm_after_stage=True)
    cfg.neck.update(neck)
    cfg.rpn_head.anchor_generator.strides = [4, 8, 16, 32, 64][-cfg.neck.num_outs :]
    model = MODELS.build(cfg)
    randomize(model, 3)
    slab_det.set_gamma(model, 0)
    fused = slab_det.fuse(model.eval())
    verify_fusion(model, fused, [torch.randn(1, 3, 65, 90)])
    left = fused.fusion_report.select('affine')
    assert [fate.norm for fate in left] == [f'backbone.layers.{level}.2' for level in levels]
    assert all(reason in fate.reason for fate in left)


def test_all_or_nothing(pvt_detector):
    """A padded reduction keeps norm1 from the queries too, and nothing else."""
    model = pvt_detector().double()
    attn = model.backbone.layers[0][1][1].attn
    conv = nn.Conv2d(8, 8, 4, 4, padding=2).double()
    conv.load_state_dict(attn.sr.state_dict())
    attn.sr = conv
    fused = slab_det.fuse(model)
    block = 'backbone.layers.0.1.1'
    assert left_after_stages(fused) == {f'{block}.norm1': f'{block}.attn.sr: {PADDED}'}
    assert torch.equal(fused.get_submodule(block).attn.attn.in_proj_weight[:8], attn.attn.in_proj_weight[:8])
    assert_fused_equals(fused, model, count=2)


class NosyAttention(SpatialReductionAttention):
    def forward(self, x, hw_shape, identity=None):
        return super().forward(x, hw_shape, identity) + x


def test_an_attention_of_another_class_keeps_its_norms(pvt_detector):
    model = pvt_detector(**STOCK[0]).double()
    block = model.backbone.layers[0][1][1]
    block.attn.__class__ = NosyAttention
    fused = slab_det.fuse(model)
    left = left_after_stages(fused)
    assert list(left) == ['backbone.layers.0.1.1.norm1', 'backbone.layers.0.1.1.attn.norm']
    assert 'NosyAttention' in left['backbone.layers.0.1.1.norm1']
    assert_fused_equals(fused, model, count=2)


def test_adaptive_padding_keeps_the_norm_before_it(pvt_detector):
    model = pvt_detector(**STOCK[0], norm_after_stage=True, paddings=[0, 'corner', 0, 0]).double()
    fused = slab_det.fuse(model)
    assert left_after_stages(fused) == {'backbone.layers.0.2': 'the next patch embedding pads the map'}
    assert_fused_equals(fused, model, count=2)


def training_sample(size):
    instances = InstanceData(
        bboxes=torch.tensor([[8.0, 8.0, 50.0, 40.0]]),
        labels=torch.tensor([1]),
        masks=BitmapMasks(np.ones((1, *size), np.uint8), *size),
    )
    sample = DetDataSample(
        metainfo=dict(img_shape=size, batch_input_shape=size, pad_shape=size, ori_shape=size, scale_factor=(1.0, 1.0))
    )
    sample.gt_instances = instances
    return sample


@pytest.mark.parametrize(
    'backbone',
    [*STOCK, dict(OURS['mixed'], norm_after_stage=True, ffn_norm='pre_act')],
    ids=lambda backbone: backbone.get('type', 'SLABPVT'),
)
def test_it_trains_recalibrates_and_fuses(pvt_detector_cfg, backbone):
    model = MODELS.build(pvt_detector_cfg(**backbone))
    model.init_weights()
    slab_det.set_gamma(model, 0.5)
    model.train()
    norms = [m for m in model.modules() if isinstance(m, OfflineNorm)]
    before = [norm.statistics()[1].clone() for norm in norms]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = model.loss(torch.randn(2, 3, 96, 80), [training_sample((96, 80)) for _ in range(2)])
    total = sum(loss if torch.is_tensor(loss) else sum(loss) for name, loss in losses.items() if 'loss' in name)
    total.backward()
    assert total.isfinite()
    without = [name for name, p in model.backbone.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []
    optimizer.step()
    assert not any(torch.equal(old, norm.statistics()[1]) for old, norm in zip(before, norms, strict=True))

    slab_det.set_gamma(model, 0)
    model.eval().double()
    report = slab_det.recalibrate(model, [torch.randn(2, 3, 90, 70).double()], progress=False, max_passes=40)
    assert report.converged and report.num_norms == sum(
        not name.endswith('repbn') for name, m in model.named_modules() if isinstance(m, OfflineNorm)
    )
    assert_fused_equals(slab_det.fuse(model), model, count=1)


@pytest.mark.parametrize(
    'backbone',
    [dict(OURS['mixed'], qkv_bias=False), dict(OURS['V2'], attention='focused'), *STOCK],
    ids=lambda backbone: backbone.get('type', 'SLABPVT'),
)
def test_a_saved_fused_detector_is_rebuilt_from_its_config(tmp_path, pvt_detector, pvt_detector_cfg, backbone):
    fused = slab_det.fuse(pvt_detector(**backbone))
    cfg = pvt_detector_cfg(**backbone)
    cfg.backbone.pretrained = None
    cfg.backbone.init_cfg = dict(type='Pretrained', checkpoint='not/there.pth')
    checkpoint, config = save_fused(fused, Config(dict(model=cfg)), tmp_path / 'fused.pth')
    rebuilt = MODELS.build(Config.fromfile(config).model).eval()
    rebuilt.init_weights()
    rebuilt.load_state_dict(torch.load(checkpoint, weights_only=True)['state_dict'], strict=True)
    images = torch.randn(1, 3, 99, 85)
    with torch.no_grad():
        for ours, theirs in zip(rebuilt.extract_feat(images), fused.extract_feat(images), strict=True):
            assert torch.equal(ours, theirs)
