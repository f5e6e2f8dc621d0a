"""timm's ViT, DeiT and Swin: offline norms fold exactly, and LayerNorms are absorbed."""

import pytest
import torch
from conftest import as_trained, make_affine, relative_difference
from timm.layers import LayerNorm
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import slab_det

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=5)
SWIN = dict(embed_dim=12, depths=(2, 2), num_heads=(1, 2), num_classes=5)
# Class, arguments, image size, and the norms that do not fold.
MODELS = {
    'ViT': (VisionTransformer, VIT, 32, ['norm']),
    'ViT with options': (
        VisionTransformer,
        dict(VIT, init_values=0.3, qkv_bias=False, scale_mlp_norm=True, embed_norm_layer=LayerNorm),
        32,
        ['norm'],
    ),
    'DeiT': (VisionTransformerDistilled, VIT, 32, ['norm']),
    'Swin': (SwinTransformer, dict(SWIN, img_size=56), 56, ['norm']),
    # Maps of sides 16 and 8, padded to windows of 7.
    'padded Swin': (
        SwinTransformer,
        dict(SWIN, img_size=64),
        64,
        [*(f'layers.{i}.blocks.{j}.norm1' for i in (0, 1) for j in (0, 1)), 'norm'],
    ),
    'Swin of any size': (
        SwinTransformer,
        dict(SWIN, img_size=56, strict_img_size=False),
        64,
        [*(f'layers.{i}.blocks.{j}.norm1' for i in (0, 1) for j in (0, 1)), 'norm'],
    ),
}


def converted(model, seed=0):
    return as_trained(slab_det.convert_norms(model), seed).double()


@pytest.mark.parametrize('name', MODELS)
def test_norms_of_timm_fold_exactly(name):
    build, options, size, left = MODELS[name]
    model = converted(build(**options))
    fused = slab_det.fuse(model)
    report = fused.fusion_report
    assert [fusion.norm for fusion in report.select('affine')] == left, str(report)
    assert len(report.select('folded')) >= len(report.norms) - len(left) >= 4
    reasons = {fusion.norm: fusion.reason for fusion in report.select('affine')}
    assert all('windows are padded' in reason for norm, reason in reasons.items() if norm.endswith('norm1'))
    assert 'does not say which layer reads it' in reasons['norm']
    images = torch.randn(2, 3, size, size).double()
    assert relative_difference([fused(images)], [model(images)]) <= 1e-9


@pytest.mark.parametrize('name', ['ViT', 'ViT with options', 'Swin'])
def test_norms_of_timm_are_absorbed(name):
    """LayerNorms that are affine are absorbed without loss."""
    build, options, size, left = MODELS[name]
    model = make_affine(as_trained(build(**options).double()))
    images = [torch.randn(2, 3, size, size).double() for _ in range(5)]
    student = slab_det.absorb(model, images, 1, 'remove', progress=False)
    assert [norm for norm, module in student.named_modules() if isinstance(module, nn.LayerNorm)] == left
    assert relative_difference([student(images[0])], [model(images[0])]) <= 1e-6
    # A LayerScale stands between a layer and the stream.
    assert bool(student.absorption_report.refits) == (name != 'ViT with options')
