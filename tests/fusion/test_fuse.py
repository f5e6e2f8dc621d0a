import copy

import pytest
import torch
from conftest import SLA, random_sizes, randomize, raw_outputs
from mmdet.registry import MODELS
from torch import nn

import slab_det
from slab_det.fusion import FusionError
from slab_det.fusion.verify import verify_fusion
from slab_det.norms import ChannelAffine, OfflineNorm

ATTENTIONS = {
    'softmax': {},
    'sla': SLA,
    'focused': dict(SLA, attention='focused'),
    'sla, mask_padding': dict(SLA, mask_padding=True),
}


@pytest.mark.parametrize('detector, num_outputs', [('mask_rcnn', 3), ('faster_rcnn', 2)])
@pytest.mark.parametrize('attention', ATTENTIONS)
def test_fused_detector_computes_the_same_in_float64(small_detector, detector, num_outputs, attention):
    model = small_detector(detector, **ATTENTIONS[attention]).double()
    fused = slab_det.fuse(model)
    assert not [m for m in fused.modules() if isinstance(m, (OfflineNorm, ChannelAffine, nn.LayerNorm))]
    for i, (height, width) in enumerate(random_sizes(20, seed=1)):
        images = torch.randn(1 + i % 2, 3, height, width).double()
        outputs, references = raw_outputs(fused, images), raw_outputs(model, images)
        assert len(references) == len(images) + num_outputs
        for output, reference in zip(outputs, references, strict=True):
            difference = (output - reference).abs().max() / reference.abs().max()
            assert difference <= 1e-9, (attention, height, width, difference)


@pytest.mark.parametrize('attention', ATTENTIONS)
def test_fused_features_keep_law_1_in_float64_and_float32(small_detector, attention):
    model = small_detector(**ATTENTIONS[attention])
    images = [torch.randn(1 + i % 2, 3, *size) for i, size in enumerate(random_sizes(20, seed=2))]

    def neck_and_rpn(model, images):
        features = model.extract_feat(images)
        return [*features, *(x for level in model.rpn_head(features) for x in level)]

    check = verify_fusion(model, slab_det.fuse(model), images, extract=neck_and_rpn)
    assert check.float64 <= 1e-9 and check.float32 <= 10 * check.float32_own, check
    assert check.num_inputs == 20


def test_verify_fusion_refuses_a_model_that_differs(small_detector):
    model = small_detector()
    fused = slab_det.fuse(model)
    with torch.no_grad():
        fused.backbone.stages[1].blocks[0].attn.w_msa.padding_qkv += 0.01
    with pytest.raises(FusionError, match='differs'):
        verify_fusion(model, fused, [torch.randn(1, 3, 45, 70)])


def test_fused_detector_keeps_padding_bias(small_detector):
    """Without the unfused bias on padding tokens, maps that are no multiple of the window differ, others do not."""
    model = small_detector(window_size=7).double()
    fused = slab_det.fuse(model)
    for module in fused.modules():
        if hasattr(module, 'padding_qkv'):
            module.padding_qkv = None
    with torch.no_grad():
        for side, same in ((224, True), (225, False)):
            images = torch.randn(1, 3, side, side).double()
            ours, reference = fused.backbone(images)[0], model.backbone(images)[0]
            # Stage 0 alone, whose output norm is folded away: compare through the lateral convolution.
            difference = (fused.neck.lateral_convs[0](ours) - model.neck.lateral_convs[0](reference)).abs().max()
            assert (difference < 1e-9) == same, (side, difference)


def test_report_names_a_layer_for_every_norm(small_detector):
    report = slab_det.fuse(small_detector()).fusion_report
    into = {fate.norm: fate.into for fate in report.norms}
    assert {fate.fate for fate in report.norms} == {'folded'}
    # 1 patch embedding, 2 per block, 3 mergings, 4 outputs
    assert len(into) == 1 + 2 * 6 + 3 + 4
    assert into['backbone.patch_embed.norm'] == 'backbone.patch_embed.projection'
    assert into['backbone.stages.0.blocks.1.norm1'] == 'backbone.stages.0.blocks.1.attn.w_msa.qkv'
    assert into['backbone.stages.0.blocks.1.norm2'] == 'backbone.stages.0.blocks.1.ffn.layers.0.0'
    assert into['backbone.stages.2.downsample.norm'] == 'backbone.stages.2.downsample.reduction'
    assert into['backbone.norm3'] == 'neck.lateral_convs.3.conv'


def test_layer_norms_on_the_outputs_are_kept_and_named(small_detector):
    model = small_detector(out_norm_cfg=dict(type='LN'))
    fused = slab_det.fuse(model)
    kept = fused.fusion_report.select('kept')
    assert [fate.norm for fate in kept] == [f'backbone.norm{i}' for i in range(4)]
    assert {fate.kind for fate in kept} == {'LayerNorm'}
    verify_fusion(model, fused, [torch.randn(1, 3, 65, 90)])


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN'])
@pytest.mark.parametrize(
    'options', [dict(qkv_bias=False), dict(patch_norm=False), dict(out_indices=(1, 2, 3))], ids=str
)
def test_other_norms_and_options_fuse_exactly(small_detector, norm, options):
    model = small_detector(norm_cfg=dict(type=norm), **options)
    fused = slab_det.fuse(model)
    assert not [m for m in fused.modules() if isinstance(m, OfflineNorm)]
    check = verify_fusion(model, fused, [torch.randn(2, 3, 75, 50), torch.randn(1, 3, 33, 120)])
    assert check.exact, check


@pytest.mark.parametrize('norm', ['TokenBN', 'PRepBN', 'UN'])
@pytest.mark.parametrize('ffn_norm, layer', [('pre_act', 'layers.0.0'), ('post_act', 'layers.1')])
def test_the_norm_inside_the_ffn_folds_exactly(small_detector, norm, ffn_norm, layer):
    model = small_detector(norm_cfg=dict(type=norm), ffn_norm=ffn_norm).double()
    fused = slab_det.fuse(model)
    into = {fate.norm: fate.into for fate in fused.fusion_report.norms}
    # As without, and 1 per block
    assert len(into) == 1 + 3 * 6 + 3 + 4 and all(into.values()), into
    assert into['backbone.stages.1.blocks.1.ffn.norm'] == f'backbone.stages.1.blocks.1.ffn.{layer}'
    for height, width in random_sizes(3, seed=4):
        images = torch.randn(2, 3, height, width).double()
        for output, reference in zip(raw_outputs(fused, images), raw_outputs(model, images), strict=True):
            difference = (output - reference).abs().max() / reference.abs().max()
            assert difference <= 1e-9, (height, width, difference)


@pytest.mark.parametrize(
    'neck, level, reason',
    [
        (dict(add_extra_convs='on_input', num_outs=5), 3, 'reads the same map'),
        (dict(start_level=1, num_outs=4), 0, 'does not read this level'),
        (dict(norm_cfg=dict(type='BN')), None, ''),
    ],
)
def test_output_norms_fold_only_where_the_fpn_alone_reads_them(small_detector_cfg, neck, level, reason):
    cfg = small_detector_cfg()
    cfg.neck.update(neck)
    cfg.rpn_head.anchor_generator.strides = [4, 8, 16, 32, 64][-cfg.neck.num_outs :]
    model = MODELS.build(cfg)
    randomize(model, 3)
    slab_det.set_gamma(model, 0)
    fused = slab_det.fuse(model.eval())
    verify_fusion(model, fused, [torch.randn(1, 3, 65, 90)])
    left = fused.fusion_report.select('affine')
    assert [fate.norm for fate in left] == ([] if level is None else [f'backbone.norm{level}'])
    assert all(reason in fate.reason for fate in left)


def test_fusing_a_copy_leaves_the_model_alone_and_in_place_changes_it(small_detector):
    model = small_detector()
    before = copy.deepcopy(model.state_dict())
    fused = slab_det.fuse(model)
    assert fused is not model and not hasattr(model, 'fusion_report')
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert slab_det.fuse(model, inplace=True) is model
    for key, value in fused.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_fuse_refuses_training_mode_gamma_and_broken_statistics(small_detector):
    with pytest.raises(FusionError, match=r'model\.eval\(\)'):
        slab_det.fuse(small_detector().train())
    model = small_detector()
    model.backbone.norm0.train()
    with pytest.raises(FusionError, match=r'model\.eval\(\)'):
        slab_det.fuse(model)
    model = small_detector()
    model.backbone.stages[1].blocks[0].norm2.gamma = 0.25
    with pytest.raises(FusionError, match=r'backbone\.stages\.1\.blocks\.0\.norm2: gamma = 0\.25.*finish'):
        slab_det.fuse(model, inplace=True)
    assert not hasattr(model, 'fusion_report')
    model = small_detector()
    model.backbone.norm2.repbn.running_var[3] = float('nan')
    with pytest.raises(FusionError, match=r'backbone\.norm2: .*not finite'):
        slab_det.fuse(model)
