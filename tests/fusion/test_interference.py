"""Norms do not fold into layers with unknown readers, hooks, computed weights or shared weights."""

from operator import attrgetter

import pytest
import torch
from conftest import FOUR_STAGE_PVT, SMALL_SWIN, as_trained, random_sizes, relative_difference, small_mmdet_cfg
from fusion_checks import SIZE, assert_fused_equals, left_affine, outputs
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmdet.models.detectors import RetinaNet
from mmdet.registry import MODELS
from torch import nn

import slab_det
from slab_det.attention import ShiftedWindowAttention

BLOCK = 'backbone.stages.0.blocks.1'
PVT = dict(FOUR_STAGE_PVT, norm_after_stage=True)


def build_pvt(**options):
    return as_trained(MODELS.build({**PVT, **options})).double()


def nosy(kind):
    """A subclass whose forward reads its input a second time."""

    def forward(self, x, *args, **kwargs):
        return kind.forward(self, x, *args, **kwargs) + x.mean()

    return type(f'Nosy{kind.__name__}', (kind,), dict(forward=forward))


STOCK_SWIN = dict(type='SwinTransformer')


@pytest.mark.parametrize(
    ('backbone', 'part', 'kind', 'norms'),
    [
        ({}, f'{BLOCK}.attn', nosy(ShiftedWindowAttention), ['norm1']),
        (STOCK_SWIN, f'{BLOCK}.attn', type('OtherAttention', (ShiftWindowMSA,), {}), ['norm1']),
        (STOCK_SWIN, f'{BLOCK}.ffn', nosy(FFN), ['norm2']),
        (PVT, 'layers.0.1.1.attn', nosy(SpatialReductionAttention), ['norm1', 'attn.norm']),
    ],
)
def test_an_unknown_reader_of_a_norm_leaves_it_as_affine(small_detector, backbone, part, kind, norms):
    model = build_pvt(type='PyramidVisionTransformer') if backbone is PVT else small_detector(**backbone).double()
    block = part.partition('.attn')[0].removesuffix('.ffn')
    model.get_submodule(part).__class__ = kind
    fused = slab_det.fuse(model)
    left = left_affine(fused)
    left = {norm: reason for norm, reason in left.items() if norm.startswith(block)}
    assert list(left) == [f'{block}.{norm}' for norm in norms]
    assert f'{part} is a {kind.__name__}' in left[f'{block}.{norms[0]}']
    assert type(fused.get_submodule(part)) is kind
    assert_fused_equals(fused, model)


def add_pre_hook(module):
    module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))


def add_hook(module):
    module.register_forward_hook(lambda _, args, out: out + args[0].mean())


def replace_forward(module):
    forward = module.forward
    module.forward = lambda x, *args: forward(x * 0.5, *args)


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize(
    ('change', 'layer', 'norm', 'reason'),
    [
        (nn.utils.parametrizations.weight_norm, 'attn.w_msa.qkv', 'norm1', 'ParametrizedLinear'),
        (nn.utils.spectral_norm, 'ffn.layers.0.0', 'norm2', 'hooks'),
        (add_pre_hook, 'attn.w_msa.qkv', 'norm1', 'hooks'),
        (add_hook, 'ffn.layers.0.0', 'norm2', 'hooks'),
        (add_pre_hook, 'attn', 'norm1', f'{BLOCK}.attn has forward hooks'),
        (replace_forward, 'attn.w_msa.qkv', 'norm1', 'a forward of its own'),
    ],
)
def test_hooks_and_computed_weights_of_a_layer_prevent_the_fold(small_detector, change, layer, norm, reason):
    model = small_detector().double()
    change(model.get_submodule(f'{BLOCK}.{layer}'))
    model.eval()
    # A replaced forward is bound to its layer, so a copy of the model would run the layer of the original.
    inplace = change is replace_forward
    images = torch.randn(1, 3, *SIZE).double()
    references = outputs(model, images)
    fused = slab_det.fuse(model, inplace)
    left = left_affine(fused)
    assert left.keys() == {f'{BLOCK}.{norm}'}
    assert reason in left.popitem()[1]
    assert relative_difference(outputs(fused, images), references) <= 1e-9


def test_hooks_on_the_neck_prevent_the_folds_of_output_norms(small_detector):
    model = small_detector().double()
    model.neck.register_forward_pre_hook(lambda _, args: (tuple(x.relu() for x in args[0]),))
    fused = slab_det.fuse(model)
    assert left_affine(fused) == {f'backbone.norm{i}': 'neck has forward hooks' for i in range(4)}
    assert_fused_equals(fused, model)


@pytest.mark.parametrize('shared', ['layers.0', 'layers.0.weight', 'layers.0.bias'])
def test_a_shared_layer_or_weight_takes_no_norm(shared):
    pvt = build_pvt()
    one, other = (pvt.layers[0][1][i].ffn for i in (1, 2))
    owner, _, name = shared.rpartition('.')
    setattr(attrgetter(owner)(other), name, attrgetter(shared)(one))
    images = torch.randn(1, 3, *SIZE).double()
    references = outputs(pvt, images)
    fused = slab_det.fuse(pvt)
    left = left_affine(fused)
    assert {'layers.0.1.1.norm2', 'layers.0.1.2.norm2'} <= left.keys() and 'layers.1.1.1.norm2' not in left
    assert f'its weights are also layers.0.1.2.ffn.{shared}' in left['layers.0.1.1.norm2']
    assert relative_difference(outputs(fused, images), references) <= 1e-9


class OwnDetector(RetinaNet):
    """Overrides extract_feat, which may pass the outputs of the backbone to other modules."""

    def extract_feat(self, images):
        return super().extract_feat(images)


def test_output_norms_of_a_detector_with_an_extract_feat_of_its_own_become_affine():
    neck = dict(start_level=0, add_extra_convs='on_output')
    cfg = small_mmdet_cfg('_base_/models/retinanet_r50_fpn', SMALL_SWIN, **neck)
    model = as_trained(MODELS.build(cfg), 5).double()
    assert left_affine(slab_det.fuse(model)) == {}
    model.extract_feat = model.extract_feat
    assert len(left_affine(slab_det.fuse(model))) == 4, 'an extract_feat set on the object may read the outputs'
    del model.extract_feat
    model.__class__ = OwnDetector
    fused = slab_det.fuse(model)
    left = left_affine(fused)
    assert left.keys() == {f'backbone.norm{i}' for i in range(4)}
    assert all('OwnDetector' in reason for reason in left.values())
    # Odd in both directions.
    assert_fused_equals(fused, model, [(height | 1, width | 1) for height, width in random_sizes(3, seed=6)])
