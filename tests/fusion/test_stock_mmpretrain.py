"""mmpretrain's T2T-ViT and ViT: all norms but the last are folded exactly, at every size."""

import pytest
import torch
from conftest import NEEDS_MMPRETRAIN, as_trained
from fusion_checks import NORMS, assert_fused_equals, left_affine
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope

import slab_det

pytestmark = NEEDS_MMPRETRAIN
T2T = dict(
    type='T2T_ViT',
    img_size=64,
    embed_dims=24,
    num_layers=2,
    t2t_cfg=dict(token_dims=8),
    layer_cfgs=dict(num_heads=2, feedforward_channels=48),
)
VIT = dict(
    type='VisionTransformer',
    arch=dict(embed_dims=24, num_layers=2, num_heads=2, feedforward_channels=48),
    img_size=64,
    layer_scale_init_value=0.1,
)


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize(('backbone', 'last'), [(T2T, 'norm'), (VIT, 'ln1')], ids=['T2T-ViT', 'ViT'])
def test_all_norms_but_the_last_are_folded(backbone, last, norm):
    init_default_scope('mmpretrain')
    model = MODELS.build(dict(type='mmdet.ConvertedModel', model=backbone, norm_cfg=dict(type=norm)))
    assert not any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()) or norm == 'PRepBN'
    fused = slab_det.fuse(as_trained(model.double()))
    assert [*left_affine(fused)] == [last] and not fused.fusion_report.select('kept')
    assert_fused_equals(fused, model, [(64, 64), (75, 102)])
