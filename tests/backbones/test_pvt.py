"""SLABPVT: initialisation as in mmdet, positions of linear attention, fewer stages."""

import pytest
import torch
from conftest import differing
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2
from test_backbones import PVT, V2, build

from slab_det.backbones import SLABPVT


@pytest.mark.parametrize('small', [PVT, V2], ids=['V1', 'V2'])
def test_starts_from_scratch_with_the_weights_of_mmdet(small):
    theirs = PyramidVisionTransformerV2 if small is V2 else PyramidVisionTransformer
    states = []
    for make in (lambda: build(small), lambda: theirs(**{k: v for k, v in PVT.items() if k != 'type'})):
        torch.manual_seed(5)
        model = make()
        model.init_weights()
        states.append(model.state_dict())
    assert list(states[0]) == list(states[1])
    assert not differing(*states)


def test_positions_of_linear_attention_fit_overlapping_patches():
    model = build(V2, attention='sla', pretrain_img_size=(100, 70))
    # (100 + 6 - 7) // 4 + 1 = 25, (25 + 2 - 3) // 2 + 1 = 13, 7, 4; (70 + 6 - 7) // 4 + 1 = 18, 9, 5, 3
    sizes = [blocks[0].attn.positional_encoding.shape[1] for _, blocks, _ in model.layers]
    assert sizes == [25 * 18, 13 * 9, 7 * 5, 4 * 3]


def test_fewer_stages_take_the_default_paddings_and_ratios():
    two = dict(num_layers=(1, 1), num_heads=(1, 2), patch_sizes=(4, 2), strides=(4, 2), sr_ratios=(2, 1))
    model = SLABPVT(embed_dims=8, num_stages=2, out_indices=(0, 1), **two)
    assert [out.shape[1] for out in model(torch.randn(1, 3, 32, 32))] == [8, 16]
