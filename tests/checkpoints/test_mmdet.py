"""mmdet's backbones and detectors: our backbones compute the same with their weights."""

import pytest
import torch
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from torch import nn

from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.checkpoints import load_pretrained

V2 = dict(
    patch_sizes=(7, 3, 3, 3), paddings=(3, 1, 1, 1), use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True
)
SMALL_PVT = dict(embed_dims=8, num_layers=(1, 2, 1, 1), num_heads=(1, 2, 2, 4))
SMALL_SWIN = dict(embed_dims=8, depths=(2, 2, 2, 2), num_heads=(1, 2, 2, 4))
PAIRS = {
    'swin': (SwinTransformer, SLABSwin, SMALL_SWIN, dict()),
    'pvt': (PyramidVisionTransformer, SLABPVT, SMALL_PVT, dict()),
    'pvt_v2': (PyramidVisionTransformerV2, SLABPVT, SMALL_PVT, V2),
}


def pair(name: str, **options) -> tuple[nn.Module, nn.Module]:
    """mmdet's backbone with random weights, and ours."""
    theirs, ours, config, special = PAIRS[name]
    theirs = theirs(**config).double()
    generator = torch.Generator().manual_seed(0)
    for value in theirs.state_dict().values():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(noise / value[0].numel() ** 0.5 if value.ndim > 1 else 1 + noise / 2)
    theirs.eval()
    return theirs, ours(**config, **special, **options).double().eval()


@pytest.mark.parametrize('name', PAIRS)
@pytest.mark.parametrize(
    'wrap',
    [
        lambda state: state,
        lambda state: dict(
            meta={},
            state_dict={f'backbone.{key}': value for key, value in state.items()}
            | {'neck.fpn_convs.0.conv.weight': torch.zeros(1), 'bbox_head.fc_cls.weight': torch.zeros(2)},
        ),
    ],
    ids=['backbone', 'detector'],
)
@pytest.mark.parametrize('norm', ['LN', 'PRepBN'])
def test_features_are_those_of_mmdet(name, wrap, norm):
    # The eps of LayerNorm that the mmdet backbone has by default.
    eps = 1e-5 if name == 'swin' else 1e-6
    theirs, ours = pair(name, norm_cfg=dict(type='LN', eps=eps) if norm == 'LN' else dict(type='PRepBN', ln_eps=eps))
    report = load_pretrained(ours, wrap(theirs.state_dict()))
    assert report.complete and report.format == 'native', str(report)
    assert set(report.matched) | set(report.missing_expected) == set(ours.state_dict())
    assert set(report.gammas.values()) == ({1.0} if norm == 'PRepBN' else set())
    assert any('gamma 1' in note and 'before fusing' in note for note in report.notes) == (norm == 'PRepBN')
    for size in ((224, 224), (91, 117)):
        image = torch.randn(1, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            for i, (got, want) in enumerate(zip(ours(image), theirs(image), strict=True)):
                distance = ((got - want).abs().max() / want.abs().max()).item()
                assert distance < 1e-10, f'stage {i} at {size}: {distance:.1e}'
