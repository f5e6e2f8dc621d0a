"""Attention in windows and over maps against the papers' formulas, head by head and token by token, in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slab_det.attention import MAP_ATTENTIONS, WINDOW_ATTENTIONS, ShiftedWindowAttention
from slab_det.attention.window_index import WindowIndex

HEADS, DIMS = 2, 6
CHANNELS = HEADS * DIMS
EPS = 1e-6
TABLE = (3, 4)
WORDS = pytest.mark.parametrize('word', ['softmax', 'sla', 'focused'])
LINEAR = pytest.mark.parametrize('word', ['sla', 'focused'])


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


def features(attn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The feature map f of simplified or focused attention."""
    x = torch.clamp(x, min=0)
    if hasattr(attn, 'scale'):
        x = (x + 1e-6) / torch.log1p(torch.exp(attn.scale[0, 0]))
        x = x**3 * (x.pow(2).sum(-1, keepdim=True) / x.pow(6).sum(-1, keepdim=True)).sqrt()
    return x


def linear_formula(attn, q, k, v, local):
    """Linear attention token by token; ``local(v)`` is the depthwise convolution of the values."""
    q, k = features(attn, q), features(attn, k)
    if hasattr(attn, 'scale'):
        k = k / len(k)
    heads = []
    for head in range(HEADS):
        part = slice(head * DIMS, (head + 1) * DIMS)
        weights = q[:, part] @ k[:, part].T
        heads.append(weights @ v[:, part] / (weights.sum(1, keepdim=True) + 1e-6) + local(v[:, part]))
    return torch.cat(heads, -1)


def softmax_formula(q, k, v, bias):
    """``bias(i, j, head)`` is added to the logit of query i and key j."""
    heads = []
    for head in range(HEADS):
        part = slice(head * DIMS, (head + 1) * DIMS)
        logits = q[:, part] @ k[:, part].T / DIMS**0.5
        for i in range(len(q)):
            for j in range(len(k)):
                logits[i, j] += bias(i, j, head)
        weights = torch.exp(logits)
        heads.append(weights @ v[:, part] / weights.sum(1, keepdim=True))
    return torch.cat(heads, -1)


def window_formula(attn: nn.Module, window: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """One window (N, C); tokens of different regions do not see each other in softmax attention."""
    side = attn.window_size
    q, k, v = (window @ attn.qkv.weight.T + attn.qkv.bias).split(CHANNELS, -1)
    if hasattr(attn, 'dwc'):
        k = k + attn.positional_encoding[0]
        return linear_formula(attn, q, k, v, lambda part: convolved(part, (side, side), attn.dwc.weight, attn.dwc.bias))

    def bias(i, j, head):
        rows, columns = i // side - j // side + side - 1, i % side - j % side + side - 1
        table = attn.relative_position_bias_table[rows * (2 * side - 1) + columns, head]
        return table - 100.0 * bool(regions[i] != regions[j])

    return softmax_formula(q, k, v, bias)


def shifted_formula(block: ShiftedWindowAttention, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Pads, rolls and cuts (B, H * W, C), attends in every window and puts it back."""
    attn, shift, side = block.w_msa, block.shift_size, block.w_msa.window_size
    image = F.pad(x.unflatten(1, (height, width)), (0, 0, 0, -width % side, 0, -height % side))
    image = image.roll((-shift, -shift), (1, 2))
    regions = torch.zeros(image.shape[1:3])
    if shift:
        rows, columns = (torch.arange(n) for n in regions.shape)
        regions[rows >= len(rows) - side] += 10
        regions[rows >= len(rows) - shift] += 10
        regions[:, columns >= len(columns) - side] += 1
        regions[:, columns >= len(columns) - shift] += 1
    out = torch.zeros_like(image)
    for sample, result in zip(image, out, strict=True):
        for top in range(0, image.shape[1], side):
            for left in range(0, image.shape[2], side):
                here = slice(top, top + side), slice(left, left + side)
                mixed = window_formula(attn, sample[here].flatten(0, 1), regions[here].flatten())
                result[here] = (mixed @ attn.proj.weight.T + attn.proj.bias).unflatten(0, (side, side))
    return out.roll((shift, shift), (1, 2))[:, :height, :width].flatten(1, 2)


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


def map_formula(attn: nn.Module, tokens: torch.Tensor, shape: tuple) -> torch.Tensor:
    """One map (N, C) through the attention."""
    source, source_shape = reduced(attn, tokens, shape)
    projections = zip(attn.attn.in_proj_weight.chunk(3), attn.attn.in_proj_bias.chunk(3), strict=True)
    q, k, v = (x @ weight.T + bias for x, (weight, bias) in zip((tokens, source, source), projections, strict=True))
    if hasattr(attn, 'dwc'):
        k = k + bilinear(attn.positional_encoding[0], TABLE, source_shape)

        def local(part):
            return convolved(bilinear(part, source_shape, shape), shape, attn.dwc.weight, attn.dwc.bias)

        mixed = linear_formula(attn, q, k, v, local)
    else:
        mixed = softmax_formula(q, k, v, lambda i, j, head: 0.0)
    return mixed @ attn.attn.out_proj.weight.T + attn.attn.out_proj.bias


def randomized(module: nn.Module) -> nn.Module:
    for parameter in module.double().eval().parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def make_block(word: str, side: int, shift: int, **kwargs) -> ShiftedWindowAttention:
    return randomized(ShiftedWindowAttention(WINDOW_ATTENTIONS[word](CHANNELS, HEADS, side, **kwargs), shift, 0.0))


def make_map(word: str, ratio: int) -> nn.Module:
    norm = dict(type='LN', eps=EPS)
    return randomized(MAP_ATTENTIONS[word](CHANNELS, HEADS, sr_ratio=ratio, norm_cfg=norm, table_shape=TABLE))


def run(geometry: str, block: ShiftedWindowAttention, x: torch.Tensor, hw_shape: tuple[int, int]) -> torch.Tensor:
    """The output of an attention that uses one of the geometries."""
    block = copy.deepcopy(block)
    if geometry == 'symbolic':
        block.make_windows = WindowIndex
        return torch.cat([block(image[None], hw_shape) for image in x])
    return block(x, hw_shape)


# Rows and columns of the map, side of the windows, shift: whole and odd sizes, one window and many.
@pytest.mark.parametrize(
    ('height', 'width', 'side', 'shift'),
    [(8, 12, 4, 0), (8, 8, 4, 2), (7, 9, 4, 0), (7, 9, 4, 2), (3, 2, 5, 2), (1, 11, 3, 1)],
)
@WORDS
@torch.no_grad()
def test_windows_equal_the_formula_over_every_geometry(word, height, width, side, shift):
    block = make_block(word, side, shift)
    x = torch.randn(2, height * width, CHANNELS, dtype=torch.double)
    expected = shifted_formula(block, x, height, width)
    for geometry in ('rolled', 'symbolic'):
        out = run(geometry, block, x, (height, width))
        torch.testing.assert_close(
            out, expected, rtol=1e-9, atol=1e-9, msg=f'{geometry}: {(out - expected).abs().max()}'
        )


@pytest.mark.parametrize('shape', [TABLE, (6, 8), (7, 5), (2, 9)])
@pytest.mark.parametrize('ratio', [1, 2])
@WORDS
@torch.no_grad()
def test_maps_equal_the_formula(word, ratio, shape):
    attn = make_map(word, ratio)
    x = torch.randn(2, shape[0] * shape[1], CHANNELS, dtype=torch.double)
    expected = torch.stack([map_formula(attn, tokens, shape) for tokens in x])
    torch.testing.assert_close(attn(x, shape) - x, expected, rtol=1e-10, atol=1e-10)


@WORDS
def test_gradients_match_finite_differences(word):
    block, attn = make_block(word, 2, 1), make_map(word, 2)
    x = torch.randn(2, 3 * 2, CHANNELS, dtype=torch.double, requires_grad=True)
    # The bias has a gradient from padding slots too.
    assert torch.autograd.gradcheck(lambda x, bias: block(x, (3, 2)), (x, block.w_msa.qkv.bias))
    assert torch.autograd.gradcheck(lambda x: attn(x, (3, 2)), (x,))


SIDE = 56


def pass_through(word: str, over: str) -> nn.Module:
    """q = k = v = x, and the output as it is: activations of the input's size everywhere."""
    if over == 'windows':
        module = ShiftedWindowAttention(WINDOW_ATTENTIONS[word](16, 2, SIDE), 0, 0.0)
    else:
        module = MAP_ATTENTIONS[word](16, 2, table_shape=(SIDE, SIDE))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(('qkv.weight', 'in_proj_weight')):
                parameter.copy_(torch.eye(16).repeat(3, 1))
            elif name.endswith(('.proj.weight', 'out_proj.weight')):
                parameter.copy_(torch.eye(16))
            elif name.endswith('bias'):
                parameter.zero_()
    return module


@pytest.mark.parametrize('over', ['windows', 'a map'])
@pytest.mark.parametrize('way', ['autocast', 'cast'])
@LINEAR
def test_linear_attention_stays_finite_in_float16_on_activations_of_100(word, over, way):
    """It sums over thousands of tokens, which float16 cannot hold."""
    x = (100 * torch.rand(1, SIDE**2, 16)).half()
    assert not (x.transpose(1, 2) @ x).isfinite().any(), 'the sums over keys must overflow float16'
    module = pass_through(word, over)
    exact = copy.deepcopy(module).double()(x.double(), (SIDE, SIDE))
    if way == 'cast':
        with torch.no_grad():
            y = module.half()(x, (SIDE, SIDE))
    else:
        x = x.float().requires_grad_()
        with torch.autocast('cpu', torch.float16):
            y = module(x.half(), (SIDE, SIDE))
        # Inside, autocast would lower the products of the backward pass as well.
        y.float().square().mean().backward()
        assert all(tensor.grad.isfinite().all() for tensor in (x, *module.parameters()))
    assert y.isfinite().all() and (y.double() - exact).norm() < 0.01 * exact.norm()
