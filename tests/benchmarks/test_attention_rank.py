"""Rank of attention maps: its definitions, and that the maps are those of the backbone at work."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONFIGS, randomize
from mmdet.registry import MODELS
from torch import nn

from benchmarks.attention_rank import effective_rank, main, measure_attention_rank, numerical_rank, window_tokens

SWIN = dict(
    type='SLABSwin',
    embed_dims=8,
    depths=(2, 1, 1, 1),
    num_heads=(2, 2, 2, 4),
    attention=('sla', 'focused', 'softmax', 'softmax'),
    window_sizes=(8, 4, 4, 4),
)


def build(**cfg: object) -> nn.Module:
    model = MODELS.build({**SWIN, **cfg})
    randomize(model, 0)
    return model.double().eval()


def test_ranks_are_those_of_their_definitions() -> None:
    # Shares 1/2, 1/4, 1/4: entropy 1.5 log 2.
    for values, rank in (([5.0, 0, 0, 0], 1.0), ([2.0, 2, 2, 2], 4.0), ([0.0, 0, 0], 0.0), ([4.0, 2, 2], 2**1.5)):
        assert math.isclose(effective_rank(torch.tensor(values, dtype=torch.double)), rank, rel_tol=1e-12)
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(9, 3)) @ rng.normal(size=(3, 9))
    assert numerical_rank(torch.linalg.svdvals(torch.from_numpy(matrix))) == np.linalg.matrix_rank(matrix) == 3


@pytest.mark.parametrize(('stage', 'kind'), [(0, 'sla'), (1, 'focused'), (2, 'softmax')])
def test_linear_attention_has_the_rank_of_its_features_and_the_convolution_lifts_it(stage: int, kind: str) -> None:
    model, image = build(), torch.randn(1, 3, 64, 64, dtype=torch.double)
    with torch.no_grad():
        before = model(image)
    place, maps = measure_attention_rank(model, image, stage=stage)
    with torch.no_grad():
        for first, second in zip(before, model(image), strict=True):
            assert torch.equal(first, second), 'the backbone is left as it was'
    tokens, dims = {0: (64, 4), 1: (16, 8), 2: (16, 16)}[stage]
    assert place == f'stage {stage}, block 0, head 0, {tokens} tokens of the middle window, d = {dims}'
    alone, convolved = maps[kind], maps.get(f'{kind} + depthwise convolution')
    torch.testing.assert_close(alone.matrix.sum(1), torch.ones(tokens).double(), atol=1e-3, rtol=0)
    if kind == 'softmax':
        assert convolved is None and alone.numerical_ranks == [tokens]
        return
    assert max(alone.numerical_ranks) <= dims < min(convolved.numerical_ranks)
    assert max(alone.effective_ranks) < min(convolved.effective_ranks)
    # Each channel has its own kernel, one head one attention.
    assert len(alone.effective_ranks) == 1 and len(set(convolved.effective_ranks)) == dims


def test_matrix_times_values_is_the_output_of_the_module() -> None:
    """In a shifted block on a map of 10x18 tokens with padding."""
    model = build(attention='softmax')
    attention, qkv, mixed = model.stages[0].blocks[1].attn, [], []
    attention.w_msa.qkv.register_forward_hook(lambda module, args, out: qkv.append(out))
    attention.w_msa.proj.register_forward_pre_hook(lambda module, args: mixed.append(args[0]))
    # Padding tokens have q, k and v of their own; here their values are zero.
    nn.init.zeros_(attention.w_msa.qkv.bias)
    _, maps = measure_attention_rank(model, torch.randn(1, 3, 40, 72, dtype=torch.double), block=1)
    tokens = window_tokens((10, 18), 8, 4)[3]
    values = qkv[0][0, tokens, 16:20]
    torch.testing.assert_close(maps['softmax'].matrix @ values, mixed[0][0, tokens, :4], rtol=1e-10, atol=1e-12)


def test_windows_of_a_shifted_map_hold_each_token_once() -> None:
    windows = window_tokens((3, 5), 4, 1)
    # Padded to 4x8 and rolled by one: rows 1, 2, padding, 0; columns 1 to 4 | padding and 0.
    assert [window.tolist() for window in windows] == [[6, 7, 8, 9, 11, 12, 13, 14, 1, 2, 3, 4], [5, 10, 0]]


def test_script_prints_draws_and_stores(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / 'rank.png'
    config = str(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
    small = 'model.backbone.window_sizes=[4,4,4,4]'
    command = [config, '--with', config, '--out', out, '--size', 64, 96, '--cfg-options', small]
    monkeypatch.setattr(sys, 'argv', ['attention_rank.py', *map(str, command)])
    main()
    title = 'SLAB-Swin-32x2222, RANDOM WEIGHTS (seed 0)'
    rows = [line.split(' | ') for line in capsys.readouterr().out.splitlines() if line.startswith(f'| {title}')]
    assert [row[1] for row in rows] == ['sla', 'sla + depthwise convolution'] * 2
    content = json.loads(out.with_suffix('.json').read_text())
    assert content['scope'].startswith('a generated image at 64x96 (HxW)') and 'torch' in content['versions']
    found = next(iter(content['maps'].values()))['sla']
    assert rows[0][2] == f'{found["effective_ranks"][0]:.1f}' and len(content['maps']) == 2
    assert out.read_bytes().startswith(b'\x89PNG')
