"""Layer-wise learning rates, as real constructors of optimizers give them to our backbones."""

from __future__ import annotations

import pytest
from conftest import NEEDS_MMPRETRAIN, SMALL_PVT_V2, SMALL_SWIN, build_detector_cfg
from mmdet.registry import MODELS
from mmengine.optim import build_optim_wrapper
from torch import nn

CSWIN = dict(type='SLABCSwin', embed_dims=8, depths=(1, 2, 1, 1), num_heads=(2, 2, 2, 2), pretrain_img_size=64)
VIT = dict(type='SLABViT', embed_dims=8, num_layers=3, num_heads=2, pretrain_img_size=64, out_type='cls_token')
RATE = 0.5
# A parameter of each part, and its depth, counted by hand.
DEPTHS = [
    (
        {**SMALL_SWIN, 'norm_cfg': dict(type='LN'), 'use_abs_pos_embed': True},
        8,
        {
            'patch_embed.projection.weight': 0,
            'absolute_pos_embed': 0,
            'stages.0.blocks.0.norm1.weight': 1,
            'stages.0.blocks.1.attn.w_msa.qkv.weight': 2,
            'stages.0.downsample.reduction.weight': 2,
            'stages.1.blocks.0.ffn.layers.0.0.bias': 3,
            'stages.2.blocks.0.norm2.bias': 5,
            'stages.2.downsample.norm.weight': 5,
            'stages.3.blocks.0.attn.w_msa.relative_position_bias_table': 6,
            'norm0.weight': 7,
            'norm3.bias': 7,
        },
    ),
    (
        {**SMALL_PVT_V2, 'use_abs_pos_embed': True},
        5,
        {
            'layers.0.0.projection.weight': 0,
            'layers.0.1.0.pos_embed': 0,
            'layers.0.1.1.attn.attn.in_proj_weight': 1,
            'layers.0.1.2.ffn.layers.0.weight': 2,
            'layers.0.2.weight': 2,
            'layers.1.0.norm.weight': 2,
            'layers.1.1.1.norm1.weight': 3,
            'layers.1.2.weight': 3,
        },
    ),
    (
        CSWIN,
        7,
        {
            'stages.0.0.projection.weight': 0,
            'stages.0.1.0.norm1.weight': 1,
            'stages.1.0.norm.weight': 1,
            'stages.1.1.1.attn.attns.0.get_v.weight': 3,
            'stages.3.1.0.ffn.layers.1.weight': 5,
            'norm1.weight': 6,
        },
    ),
    (
        VIT,
        5,
        {
            'cls_token': 0,
            'positions.pos_embed': 0,
            'embed.projection.bias': 0,
            'blocks.0.norm1.weight': 1,
            'blocks.2.attn.attn.out_proj.weight': 3,
            'norm.weight': 4,
        },
    ),
]


class WithHead(nn.Module):
    """A model with a backbone and a head."""

    def __init__(self, backbone: dict) -> None:
        super().__init__()
        self.backbone, self.head = MODELS.build(backbone), nn.Linear(2, 2)

    def get_layer_depth(self, param_name: str) -> tuple[int, int]:
        """As in mmpretrain's ImageClassifier."""
        return self.backbone.get_layer_depth(param_name, 'backbone.')


def rates(model: nn.Module, constructor: str, **options: object) -> dict[str, float]:
    """The learning rate of each parameter, by its name."""
    optimizer = dict(type='AdamW', lr=1.0, weight_decay=0.05)
    paramwise = dict(layer_decay_rate=RATE, **options)
    cfg = dict(type='OptimWrapper', optimizer=optimizer, constructor=constructor, paramwise_cfg=paramwise)
    groups = build_optim_wrapper(model, cfg).optimizer.param_groups
    found = {group['params'][0]: group['lr'] for group in groups}
    assert len(found) == len(groups) == len([*model.parameters()])
    return {name: found[parameter] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    'constructor',
    [
        'LayerDecayConstructor',
        pytest.param('mmpretrain.LearningRateDecayOptimWrapperConstructor', marks=NEEDS_MMPRETRAIN),
    ],
)
@pytest.mark.parametrize(('backbone', 'num_depths', 'depths'), DEPTHS, ids=[case[0]['type'] for case in DEPTHS])
def test_learning_rates_fall_with_the_distance_from_the_head(constructor, backbone, num_depths, depths):
    model = WithHead(backbone)
    found = rates(model, constructor)
    expected = {f'backbone.{name}': RATE ** (num_depths - 1 - depth) for name, depth in depths.items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found['head.weight'] == found['head.bias'] == 1
    assert sorted({*found.values()}) == pytest.approx([RATE**power for power in reversed(range(num_depths))])


@NEEDS_MMPRETRAIN
def test_depths_of_a_swin_equal_mmpretrain():
    from mmpretrain.models import SwinTransformer

    theirs = SwinTransformer(arch=dict(embed_dims=8, depths=[2, 2, 1, 1], num_heads=[1, 2, 2, 4]), out_indices=range(4))
    ours = MODELS.build({**SMALL_SWIN, 'norm_cfg': dict(type='LN')})
    names = [name for name, _ in theirs.named_parameters()]
    assert {name: ours.get_layer_depth(name) for name in names} == {n: theirs.get_layer_depth(n) for n in names}


def test_a_detector_takes_layer_decay_with_options_of_mmengine():
    model = MODELS.build(build_detector_cfg('faster_rcnn'))
    found = rates(model, 'LayerDecayConstructor', custom_keys={'stages.3': dict(lr_mult=0.1)}, norm_decay_mult=0.0)
    assert found['backbone.stages.0.blocks.0.ffn.layers.1.weight'] == RATE**6
    assert found['backbone.stages.3.blocks.0.ffn.layers.1.weight'] == pytest.approx(0.1 * RATE)
    assert found['neck.lateral_convs.0.conv.weight'] == found['roi_head.bbox_head.fc_cls.weight'] == 1


@pytest.mark.parametrize(
    ('model', 'lr', 'rate', 'message'),
    [
        (WithHead(VIT), 1.0, 0, 'layer_decay_rate above 0'),
        (WithHead(VIT), None, 0.9, 'optimizer.lr'),
        (nn.Sequential(nn.Linear(2, 2)), 1.0, 0.9, 'NoneType has no get_layer_depth; SLABSwin'),
    ],
)
def test_what_layer_decay_cannot_do_is_named(model, lr, rate, message):
    optimizer = dict(type='AdamW') | ({} if lr is None else dict(lr=lr))
    cfg = dict(optimizer=optimizer, constructor='LayerDecayConstructor', paramwise_cfg=dict(layer_decay_rate=rate))
    with pytest.raises(ValueError, match=message):
        build_optim_wrapper(model, cfg)
