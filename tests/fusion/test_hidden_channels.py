"""Hidden channels are found and removed, and a config says how many are left."""

import pytest
import torch
from conftest import as_trained, build_detector_cfg, pictures, relative_difference
from mmdet.registry import MODELS

import slab_det
from slab_det.backbones.adopt import adopt
from slab_det.fusion import FusionError
from slab_det.fusion.channels import find_channels, resize_channels

HEADS = dict(embed_dims=16, num_heads=(1, 2, 2, 4), norm_cfg=dict(type='LN'))
PVT = dict(HEADS, num_layers=(1, 1, 1, 1), mlp_ratios=(2, 2, 2, 2), pretrain_img_size=64)


def build(**backbone):
    cfg = build_detector_cfg('faster_rcnn', **HEADS)
    cfg.backbone = backbone
    if 'PVT' in backbone['type'] or 'Pyramid' in backbone['type']:
        cfg.neck.in_channels = [16, 32, 32, 64]
    return cfg


def test_a_config_says_the_channels_that_are_left():
    name = 'backbone.stages.2.blocks.0.ffn'
    cfg = dict(type='FusedDetector', model=build(**HEADS, depths=(1, 1, 1, 1), type='SLABSwin'), folds=[])
    model = MODELS.build(dict(cfg, channels={name: 8}))
    assert find_channels(model)[name].count == 8 and model.fusion_report.channels == {name: 8}
    for wrong in ({name: 1000}, {'backbone.stages.2.blocks.0.norm1': 8}, {'nowhere': 8}):
        with pytest.raises(FusionError, match=f'{[*wrong][0]}: the config leaves .* channels of another model'):
            MODELS.build(dict(cfg, channels=wrong))


@pytest.mark.parametrize(
    'backbone',
    [
        dict(HEADS, type='SLABSwin', depths=(2, 1, 1, 1)),
        dict(HEADS, type='SwinTransformer', depths=(2, 1, 1, 1), qkv_bias=False),
        dict(PVT, type='SLABPVT'),
        dict(PVT, type='PyramidVisionTransformer'),
    ],
    ids=lambda backbone: backbone['type'],
)
def test_channels_of_heads_that_are_zero_can_go(backbone):
    """The output stays the same, also deployed and at sizes that windows do not divide."""
    cfg = build(**backbone)
    model, pruned = (as_trained(MODELS.build(cfg)) for _ in range(2))
    adopt(pruned)
    names = [name.removesuffix('.proj') for name, _ in model.named_modules() if name.endswith('w_msa.proj')]
    names += [name.removesuffix('.attn.out_proj') for name, _ in model.named_modules() if name.endswith('.out_proj')]
    resize_channels(pruned, {name: model.get_submodule(name).embed_dims // 2 for name in names})
    state, shapes = model.state_dict(), {name: value.shape for name, value in pruned.state_dict().items()}
    for name, value in state.items():
        if value.shape != shapes[name]:
            attention = model.get_submodule(next(owner for owner in names if name.startswith(f'{owner}.')))
            if 'proj.' in name:
                parts = value.unflatten(1, (attention.num_heads, -1))
                state[name] = parts.chunk(2, 2)[0].flatten(1)
            else:
                parts = value.unflatten(0, (3, attention.num_heads, -1))
                state[name] = parts.chunk(2, 2)[0].flatten(0, 2)
            parts.chunk(2, 2)[1].zero_()
    pruned.load_state_dict(state)
    deployed = slab_det.deploy(pruned)
    for size in ((64, 64), (75, 101)):
        image = pictures(1, size)[0]
        with torch.no_grad():
            maps = model.extract_feat(image)
            assert relative_difference(pruned.extract_feat(image), maps) < 1e-4
            assert relative_difference(deployed.extract_feat(image), maps) < 1e-4
