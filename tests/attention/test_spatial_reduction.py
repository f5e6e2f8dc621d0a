"""Attention over maps against the papers' formulas, head by head and token by token, in float64."""

import math

import pytest
import torch
from torch import nn

from slab_det.attention import FocusedMapAttention, SimplifiedMapAttention, SoftmaxMapAttention, resize_table
from slab_det.deployment import tiles
from slab_det.deployment.attention import TiledMapAttention

HEADS, DIMS = 2, 6
CHANNELS = HEADS * DIMS
EPS = 1e-6
TABLE = (3, 4)
KINDS = [SoftmaxMapAttention, SimplifiedMapAttention, FocusedMapAttention]
LINEAR = KINDS[1:]


def bilinear(rows: torch.Tensor, shape: tuple, target: tuple) -> torch.Tensor:
    """A table (H * W, C) at another size, row by row: corners of pixels are aligned, the border is repeated."""
    image, out = rows.unflatten(0, shape), []
    for row in range(target[0]):
        for column in range(target[1]):
            y = max((row + 0.5) * shape[0] / target[0] - 0.5, 0)
            x = max((column + 0.5) * shape[1] / target[1] - 0.5, 0)
            top, left = math.floor(y), math.floor(x)
            bottom, right = min(top + 1, shape[0] - 1), min(left + 1, shape[1] - 1)
            a, b = y - top, x - left
            out.append(
                (1 - a) * ((1 - b) * image[top, left] + b * image[top, right])
                + a * ((1 - b) * image[bottom, left] + b * image[bottom, right])
            )
    return torch.stack(out)


def convolved(values: torch.Tensor, shape: tuple, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A 5x5 depthwise convolution of (H * W, d), neighbour by neighbour."""
    image, out = values.unflatten(0, shape), []
    for row in range(shape[0]):
        for column in range(shape[1]):
            total = bias.clone()
            for i in range(max(row - 2, 0), min(row + 3, shape[0])):
                for j in range(max(column - 2, 0), min(column + 3, shape[1])):
                    total += kernel[:, 0, i - row + 2, j - column + 2] * image[i, j]
            out.append(total)
    return torch.stack(out)


def reduced(attn: nn.Module, tokens: torch.Tensor, shape: tuple) -> tuple[torch.Tensor, tuple]:
    """Blocks of r x r tokens as one token each, through a LayerNorm."""
    ratio = attn.sr_ratio
    if ratio == 1:
        return tokens, shape
    image, target = tokens.unflatten(0, shape), (shape[0] // ratio, shape[1] // ratio)
    out = []
    for row in range(target[0]):
        for column in range(target[1]):
            total = attn.sr.bias.clone()
            for i in range(ratio):
                for j in range(ratio):
                    total += attn.sr.weight[:, :, i, j] @ image[row * ratio + i, column * ratio + j]
            centred = total - total.mean()
            out.append(centred / (centred.pow(2).mean() + EPS).sqrt() * attn.norm.weight + attn.norm.bias)
    return torch.stack(out), target


def features(attn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = torch.clamp(x, min=0)
    if isinstance(attn, FocusedMapAttention):
        x = (x + 1e-6) / torch.log1p(torch.exp(attn.scale[0, 0]))
        x = x**3 * (x.pow(2).sum(-1, keepdim=True) / x.pow(6).sum(-1, keepdim=True)).sqrt()
    return x


def formula(attn: nn.Module, tokens: torch.Tensor, shape: tuple) -> torch.Tensor:
    """One map (N, C) through the attention."""
    source, source_shape = reduced(attn, tokens, shape)
    weight, bias = attn.attn.in_proj_weight, attn.attn.in_proj_bias
    q = tokens @ weight[:CHANNELS].T + bias[:CHANNELS]
    k = source @ weight[CHANNELS : 2 * CHANNELS].T + bias[CHANNELS : 2 * CHANNELS]
    v = source @ weight[2 * CHANNELS :].T + bias[2 * CHANNELS :]
    is_linear = not isinstance(attn, SoftmaxMapAttention)
    if is_linear:
        k = k + bilinear(attn.positional_encoding[0], TABLE, source_shape)
        q, k = features(attn, q), features(attn, k)
        if isinstance(attn, FocusedMapAttention):
            k = k / len(k)
    heads = []
    for head in range(HEADS):
        part = slice(head * DIMS, (head + 1) * DIMS)
        rows = []
        for query in q[:, part]:
            if is_linear:
                weights = k[:, part] @ query
                rows.append(weights @ v[:, part] / (weights.sum() + 1e-6))
            else:
                weights = torch.exp(k[:, part] @ query / DIMS**0.5)
                rows.append(weights @ v[:, part] / weights.sum())
        mixed = torch.stack(rows)
        if is_linear:
            local = bilinear(v[:, part], source_shape, shape)
            mixed = mixed + convolved(local, shape, attn.dwc.weight, attn.dwc.bias)
        heads.append(mixed)
    return torch.cat(heads, -1) @ attn.attn.out_proj.weight.T + attn.attn.out_proj.bias


def make_attention(kind: type, ratio: int, **kwargs) -> nn.Module:
    if kind is not SoftmaxMapAttention:
        kwargs['table_shape'] = TABLE
    attn = kind(CHANNELS, HEADS, sr_ratio=ratio, norm_cfg=dict(type='LN', eps=EPS), **kwargs).double().eval()
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attn


@pytest.mark.parametrize('shape', [TABLE, (6, 8), (7, 5), (2, 9)])
@pytest.mark.parametrize('ratio', [1, 2])
@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_equals_the_formula_over_maps_and_tiles(monkeypatch, kind, ratio, shape):
    monkeypatch.setattr(tiles, 'CPU_TILE_TOKENS', 5)
    attn = make_attention(kind, ratio)
    x = torch.randn(2, shape[0] * shape[1], CHANNELS, dtype=torch.double)
    expected = torch.stack([formula(attn, tokens, shape) for tokens in x])
    torch.testing.assert_close(attn(x, shape), expected, rtol=1e-10, atol=1e-10)
    # In place, with the residual.
    tiled = TiledMapAttention(nn.Identity(), attn)(x.clone(), shape) - x
    torch.testing.assert_close(tiled, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('ratio', [1, 2])
@pytest.mark.parametrize('kind', KINDS)
def test_gradients(kind, ratio):
    attn = make_attention(kind, ratio)
    x = torch.randn(1, 4 * 3, CHANNELS, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: attn(x, (4, 3)), (x,))


@pytest.mark.parametrize('kind', LINEAR)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_large_activations_stay_finite_in_half_precision(kind, dtype):
    attn = make_attention(kind, 1).float()
    # Sums of 4096 products far beyond 65504, the largest number of float16.
    x = 40 * torch.randn(1, 64 * 64, CHANNELS)
    with torch.autocast('cpu', dtype):
        out = attn(x, (64, 64))
    assert out.dtype == dtype and out.isfinite().all()
    expected = attn(x, (64, 64))
    assert (out.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(('shape', 'target'), [((3, 4), (7, 5)), ((6, 5), (2, 3)), ((1, 1), (4, 2))])
def test_a_table_is_interpolated_in_two_dimensions(shape, target):
    table = torch.randn(1, shape[0] * shape[1], 3, dtype=torch.double)
    torch.testing.assert_close(resize_table(table, shape, target)[0], bilinear(table[0], shape, target))
    assert resize_table(table, shape, shape) is table


def test_wrong_arguments():
    with pytest.raises(ValueError, match='does not divide'):
        SoftmaxMapAttention(10, 3)
