"""Rank of attention maps: its definitions, and that the maps are those of the backbone at work."""

import json
import math

import cv2
import numpy as np
import pytest
import torch
from conftest import randomize
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.registry import MODELS
from torch import nn

from slab_det.measure.attention_rank import (
    SYNTHETIC,
    effective_rank,
    load_image,
    measure_attention_rank,
    numerical_rank,
    rank_table,
)
from slab_det.runtime.errors import AttentionRankError

SWIN = dict(
    type='SLABSwin',
    embed_dims=8,
    depths=(2, 1, 1, 1),
    num_heads=(2, 2, 2, 4),
    attention=('sla', 'focused', 'softmax', 'softmax'),
    window_sizes=(8, 4, 4, 4),
)
PVT = dict(
    type='SLABPVT',
    embed_dims=8,
    num_layers=(1, 1, 1, 1),
    num_heads=(2, 2, 2, 4),
    pretrain_img_size=64,
    attention=('sla', 'softmax', 'softmax', 'softmax'),
)


def build(**cfg: object) -> nn.Module:
    model = MODELS.build(cfg)
    randomize(model, 0)
    return model


@pytest.mark.parametrize(
    ('values', 'rank'),
    [
        ([5.0, 0, 0, 0], 1.0),
        ([2.0, 2, 2, 2], 4.0),
        ([0.0, 0, 0], 0.0),
        # Shares 1/2, 1/4, 1/4: entropy 1.5 log 2.
        ([4.0, 2, 2], 2**1.5),
    ],
)
def test_effective_rank_is_exp_of_the_entropy(values: list[float], rank: float) -> None:
    assert math.isclose(effective_rank(torch.tensor(values, dtype=torch.double)), rank, rel_tol=1e-12)


def test_numerical_rank_counts_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    for rank in (1, 3, 7):
        matrix = rng.normal(size=(9, rank)) @ rng.normal(size=(rank, 7))
        values = torch.linalg.svdvals(torch.from_numpy(matrix))
        assert numerical_rank(values, (9, 7)) == np.linalg.matrix_rank(matrix) == rank


@pytest.mark.parametrize(('stage', 'kind'), [(0, 'sla'), (1, 'focused'), (2, 'softmax')])
def test_linear_attention_has_the_rank_of_its_features_and_the_convolution_lifts_it(stage: int, kind: str) -> None:
    result = measure_attention_rank(build(**SWIN), torch.randn(1, 3, 64, 64), stage=stage, head=1)
    tokens, dims = {0: (64, 4), 1: (16, 8), 2: (16, 16)}[stage]
    assert (result.kind, tuple(result.alone.matrix.shape), result.head_dims) == (kind, (tokens, tokens), dims)
    torch.testing.assert_close(result.alone.matrix.sum(1), torch.ones(tokens).double(), atol=1e-3, rtol=0)
    if kind == 'softmax':
        assert result.convolved is None and result.alone.numerical_ranks == (tokens,)
        return
    assert max(result.alone.numerical_ranks) <= dims < min(result.convolved.numerical_ranks)
    assert max(result.alone.effective_ranks) < min(result.convolved.effective_ranks)
    # Each channel has its own kernel, one head one attention.
    assert len(result.alone.effective_ranks) == 1 and len(set(result.convolved.effective_ranks)) == dims
    values = torch.linalg.svdvals(result.convolved.matrix)
    torch.testing.assert_close(result.convolved.singular_values, values)


@pytest.mark.parametrize('window', [0, 3, 5])
def test_the_map_is_that_of_the_window_and_block_asked_for(window: int) -> None:
    """A shifted block on a map of 10x18 tokens: padding, several regions, six windows of 8x8."""
    model = build(**{**SWIN, 'attention': 'softmax'}).double().eval()
    calls = []
    attention = model.stages[0].blocks[1].attn.w_msa
    attention.register_forward_hook(lambda module, args, out: calls.append((args, out)))
    x = torch.randn(1, 3, 40, 72)
    result = measure_attention_rank(model, x, block=1, head=1, window=window)
    (q, k, v, geometry, shifted), out = calls[0]
    assert shifted and geometry.num_windows == 6
    torch.testing.assert_close(result.alone.matrix @ v[window][:, 4:], out[window][:, 4:], rtol=1e-10, atol=1e-12)
    # Six rows of padding below, six columns at the right, all in the last windows after the shift.
    slots = torch.arange(64) + 64 * window
    assert result.padding == torch.isin(geometry.padding_slots, slots).sum()
    assert (result.stage, result.block, result.head, result.window, result.shape) == (0, 1, 1, window, (8, 8))


def test_maps_without_windows_are_measured_whole() -> None:
    result = measure_attention_rank(build(**PVT), torch.randn(1, 3, 64, 48))
    assert (result.window, result.shape, result.padding) == (None, (16, 12), 0)
    assert result.alone.matrix.shape == (192, 192) and result.alone.numerical_ranks[0] <= 4
    reduced = measure_attention_rank(build(**PVT), torch.randn(1, 3, 64, 48), stage=1)
    # Softmax with a reduction of 4: 8x6 queries, 2x1 values.
    assert reduced.alone.matrix.shape == (48, 2)


def test_the_backbone_is_left_as_it_was() -> None:
    model, x = build(**SWIN).double().eval(), torch.randn(1, 3, 64, 64, dtype=torch.double)
    with torch.no_grad():
        before = model(x)
        measure_attention_rank(model, x)
        for first, second in zip(before, model(x), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize(
    ('cfg', 'options', 'message'),
    [
        (SWIN, {'stage': 4}, 'SLABSwin has no stage 4; it has 4'),
        (SWIN, {'block': 2}, 'stage 0 has blocks 0 to 1, not 2'),
        (SWIN, {'head': 2}, 'stage 0, block 0 has heads 0 to 1, not 2'),
        (SWIN, {'window': 9}, 'windows 0 to 3, not 9'),
        (PVT, {'window': 0}, 'it has no windows'),
        (dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)), {}, 'use SLABSwin'),
        (dict(type='ResNet', depth=18), {}, 'ResNet has no stage 0'),
    ],
)
def test_what_is_not_there_is_said(cfg: dict, options: dict, message: str) -> None:
    with pytest.raises(AttentionRankError, match=message):
        measure_attention_rank(MODELS.build(cfg), torch.randn(1, 3, 64, 64), **options)


def test_images_are_read_resized_and_normalised(tmp_path) -> None:
    preprocess = DetDataPreprocessor(mean=[10.0, 20, 30], std=[2.0, 4, 5], bgr_to_rgb=True, pad_size_divisor=32)
    cv2.imwrite(str(tmp_path / 'blue.png'), np.full((50, 70, 3), (90, 60, 30), np.uint8))
    found = load_image(preprocess, str(tmp_path / 'blue.png'), (32, 64))
    assert found.shape == (1, 3, 32, 64)
    torch.testing.assert_close(found[0, :, 5, 5], torch.tensor([10.0, 10, 12]))
    generated = load_image(preprocess, None, (96, 128))
    assert generated.shape == (1, 3, 96, 128) and torch.equal(generated, load_image(preprocess, None, (96, 128)))
    with pytest.raises(AttentionRankError, match='image nowhere.jpg not found'):
        load_image(preprocess, 'nowhere.jpg', (32, 32))
    (tmp_path / 'broken.png').write_bytes(b'no image')
    with pytest.raises(AttentionRankError, match='cannot be decoded'):
        load_image(preprocess, str(tmp_path / 'broken.png'), (32, 32))


def test_table_and_json_say_the_same() -> None:
    results = {'A, RANDOM WEIGHTS': measure_attention_rank(build(**SWIN), torch.randn(1, 3, 64, 64), num_channels=2)}
    rows = [line for line in rank_table(results, SYNTHETIC).splitlines() if line.startswith('| A')]
    content = json.loads(json.dumps(results['A, RANDOM WEIGHTS'].to_dict()))
    assert [row.split('|')[2].strip() for row in rows] == ['sla', 'sla + depthwise convolution']
    for row, name in zip(rows, ('alone', 'convolved'), strict=True):
        assert row.split('|')[4].split()[0] == f'{content[name]["effective_rank"]:.1f}'
        assert len(content[name]['singular_values']) == 64
    assert content['tokens'] == [64, 64] and len(content['convolved']['effective_ranks']) == 2
