"""Multiply-adds, parameters and norms of models, against published and hand-computed numbers."""

import pytest
import torch
import torch.nn.functional as F
from mmdet.registry import MODELS
from torch import nn

import slab_det
from slab_det.measure.cost import count_multiply_adds, measure_cost
from slab_det.norms import ChannelAffine

PUBLISHED = {
    'Swin-T': (4.49e9, ('SwinTransformer', 'SLABSwin'), {}),
    'PVT-T': (1.926e9, ('PyramidVisionTransformer', 'SLABPVT'), {'num_layers': [2, 2, 2, 2]}),
}


def build(kind: str, **arguments: object) -> nn.Module:
    model = MODELS.build({'type': kind, **arguments})
    model.eval()
    return model


@pytest.mark.parametrize('name', PUBLISHED)
def test_multiply_adds_match_the_papers(name: str) -> None:
    expected, kinds, arguments = PUBLISHED[name]
    image = torch.randn(1, 3, 224, 224)
    for kind in kinds:
        model = build(kind, **arguments)
        counted = count_multiply_adds(lambda model=model: model(image))
        assert counted == pytest.approx(expected, rel=5e-4), kind


def test_attention_counts_alike_in_all_implementations() -> None:
    q, k, v = torch.randn(2, 3, 50, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8)
    ways = (
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(1, 1, 50, 20)),
        lambda: (q @ k.transpose(2, 3)).softmax(3) @ v,
    )
    assert {count_multiply_adds(way) for way in ways} == {2 * 3 * (50 * 20 * 8) * 2}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason='no oneDNN')
def test_linear_layers_of_onednn_are_counted() -> None:
    x, weight, bias = torch.randn(1, 10, 16), torch.randn(32, 16), torch.randn(32)
    linear = torch.ops.mkldnn._linear_pointwise
    assert count_multiply_adds(lambda: linear(x, weight, bias, 'gelu', [], 'none')) == 10 * 16 * 32


def test_norms_are_counted_and_fusion_leaves_none(small_detector) -> None:
    norms = [nn.LayerNorm(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.SyncBatchNorm(4), ChannelAffine(4)]
    prepbn = MODELS.build({'type': 'PRepBN', 'num_features': 4})
    assert measure_cost([*norms, prepbn, nn.Linear(4, 4)], lambda: None).norms_left == 6
    unfused = small_detector()
    images, costs = torch.randn(1, 3, 64, 96), []
    for model in (unfused, slab_det.fuse(unfused)):
        parts = [model.backbone, model.neck]
        costs.append(measure_cost(parts, lambda model=model: model.extract_feat(images)))
        assert costs[-1].parameters == sum(p.numel() for part in parts for p in part.parameters())
    assert (costs[0].norms_left, costs[1].norms_left) == (1 + 2 * 6 + 3 + 4, 0)
    assert costs[1].parameters < costs[0].parameters and costs[1].multiply_adds == costs[0].multiply_adds
