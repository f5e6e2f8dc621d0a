"""Window attention against the papers' formulas, head by head and window by window, in float64."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slab_det.attention import (
    FocusedWindowAttention,
    ShiftedWindowAttention,
    SimplifiedWindowAttention,
    SoftmaxWindowAttention,
)
from slab_det.deployment import tiles
from slab_det.deployment.attention import TiledWindowAttention
from slab_det.deployment.export.token_index import WindowIndex

HEADS, DIMS = 2, 6
# Rows and columns of the map, side of the windows, shift: whole and odd sizes, one window and many.
CASES = [(8, 12, 4, 0), (8, 8, 4, 2), (7, 9, 4, 0), (7, 9, 4, 2), (3, 2, 5, 2), (1, 11, 3, 1)]


def depthwise(values: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A 5x5 depthwise convolution of (w, w, d), tap by tap."""
    side = len(values)
    padded = F.pad(values, (0, 0, 2, 2, 2, 2))
    return bias + sum(
        kernel[:, 0, row, column] * padded[row : row + side, column : column + side]
        for row in range(5)
        for column in range(5)
    )


def simplified(q, k):
    return torch.clamp(q, min=0), torch.clamp(k, min=0)


def focused(q, k, theta):
    def focus(x):
        x = (torch.clamp(x, min=0) + 1e-6) / torch.log1p(torch.exp(theta))
        return x**3 * (x.pow(2).sum(-1, keepdim=True) / x.pow(6).sum(-1, keepdim=True)).sqrt()

    return focus(q), focus(k)


def linear_window(attn: nn.Module, window: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Linear attention of one window (N, C), token by token; keys where ``keep`` is False weigh nothing."""
    q, k, v = (window @ attn.qkv.weight.T + attn.qkv.bias).split(HEADS * DIMS, -1)
    k = k + attn.positional_encoding[0]
    is_focused = isinstance(attn, FocusedWindowAttention)
    q, k = focused(q, k, attn.scale[0, 0]) if is_focused else simplified(q, k)
    scale = 1 / len(window) if is_focused else 1.0
    side = attn.window_size
    heads = []
    for head in range(HEADS):
        part = slice(head * DIMS, (head + 1) * DIMS)
        weights = (q[:, part] @ k[:, part].T) * keep * scale
        mixed = (weights @ v[:, part]) / (weights.sum(1, keepdim=True) + 1e-6)
        local = depthwise(v[:, part].unflatten(0, (side, side)), attn.dwc.weight, attn.dwc.bias)
        heads.append(mixed + local.flatten(0, 1))
    return torch.cat(heads, -1)


def softmax_window(attn: nn.Module, window: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one window, pair by pair of places."""
    q, k, v = (window @ attn.qkv.weight.T + attn.qkv.bias).split(HEADS * DIMS, -1)
    side = attn.window_size
    places = [(row, column) for row in range(side) for column in range(side)]
    heads = []
    for head in range(HEADS):
        part = slice(head * DIMS, (head + 1) * DIMS)
        logits = q[:, part] @ k[:, part].T / DIMS**0.5
        for i, (row, column) in enumerate(places):
            for j, (other_row, other_column) in enumerate(places):
                index = (row - other_row + side - 1) * (2 * side - 1) + column - other_column + side - 1
                logits[i, j] += attn.relative_position_bias_table[index, head]
        logits = logits - 100 * (regions[:, None] != regions[None])
        heads.append(logits.softmax(-1) @ v[:, part])
    return torch.cat(heads, -1)


def whole_map(block: ShiftedWindowAttention, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Pads, rolls and cuts (B, H * W, C), attends in every window and puts it back."""
    attn, shift, side = block.w_msa, block.shift_size, block.w_msa.window_size
    image = F.pad(x.unflatten(1, (height, width)), (0, 0, 0, -width % side, 0, -height % side))
    inside = F.pad(torch.ones(height, width), (0, -width % side, 0, -height % side))
    image, inside = image.roll((-shift, -shift), (1, 2)), inside.roll((-shift, -shift), (0, 1))
    regions = torch.zeros_like(inside)
    if shift:
        rows, columns = (torch.arange(n) for n in inside.shape)
        regions[rows >= len(rows) - side] += 10
        regions[rows >= len(rows) - shift] += 10
        regions[:, columns >= len(columns) - side] += 1
        regions[:, columns >= len(columns) - shift] += 1
    out = torch.zeros_like(image)
    for sample, result in zip(image, out, strict=True):
        for top in range(0, image.shape[1], side):
            for left in range(0, image.shape[2], side):
                here = slice(top, top + side), slice(left, left + side)
                window = sample[here].flatten(0, 1)
                if isinstance(attn, SoftmaxWindowAttention):
                    mixed = softmax_window(attn, window, regions[here].flatten())
                else:
                    keep = inside[here].flatten() if attn.mask_padding else torch.ones(side * side)
                    mixed = linear_window(attn, window, keep)
                result[here] = (mixed @ attn.proj.weight.T + attn.proj.bias).unflatten(0, (side, side))
    return out.roll((shift, shift), (1, 2))[:, :height, :width].flatten(1, 2)


def run(geometry: str, block: ShiftedWindowAttention, x: torch.Tensor, hw_shape: tuple[int, int]) -> torch.Tensor:
    """The attention over one of the three geometries."""
    block = copy.deepcopy(block)
    if geometry == 'tiles':
        # In place, with the residual.
        return TiledWindowAttention(nn.Identity(), block)(x.clone(), hw_shape) - x
    if geometry == 'symbolic':
        block.make_windows = WindowIndex
        return torch.cat([block(image[None], hw_shape) for image in x])
    return block(x, hw_shape)


def make_block(kind: type, side: int, shift: int, **kwargs) -> ShiftedWindowAttention:
    block = ShiftedWindowAttention(kind(HEADS * DIMS, HEADS, side, **kwargs), shift, 0.0).double().eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block


@pytest.mark.parametrize(('height', 'width', 'side', 'shift'), CASES)
@pytest.mark.parametrize(
    ('kind', 'kwargs'),
    [
        (SimplifiedWindowAttention, {}),
        (SimplifiedWindowAttention, dict(mask_padding=True)),
        (FocusedWindowAttention, {}),
        (FocusedWindowAttention, dict(mask_padding=True)),
        (SoftmaxWindowAttention, {}),
    ],
)
@torch.no_grad()
def test_equals_the_formula_over_every_geometry(monkeypatch, kind, kwargs, height, width, side, shift):
    monkeypatch.setattr(tiles, 'CPU_TILE_TOKENS', 2 * side * side)
    block = make_block(kind, side, shift, **kwargs)
    x = torch.randn(2, height * width, HEADS * DIMS, dtype=torch.double)
    expected = whole_map(block, x, height, width)
    for geometry in ('kept per size', 'tiles', 'symbolic'):
        out = run(geometry, block, x, (height, width))
        torch.testing.assert_close(
            out, expected, rtol=1e-9, atol=1e-9, msg=f'{geometry}: {(out - expected).abs().max()}'
        )


@pytest.mark.parametrize('kind', [SimplifiedWindowAttention, SoftmaxWindowAttention])
@torch.no_grad()
def test_geometries_agree_on_random_sizes_and_folded_padding(kind):
    rng = random.Random(0)
    for _ in range(20):
        side = rng.randint(2, 6)
        shape = rng.randint(1, 20), rng.randint(1, 20)
        block = make_block(kind, side, rng.randrange(side))
        # As after a fold: padding tokens hold something else than the bias.
        block.w_msa.padding_qkv = torch.randn(3 * HEADS * DIMS, dtype=torch.double)
        x = torch.randn(1, shape[0] * shape[1], HEADS * DIMS, dtype=torch.double)
        expected = block(x, shape)
        for geometry in ('tiles', 'symbolic'):
            difference = float((run(geometry, block, x, shape) - expected).abs().max())
            assert difference < 1e-10, (geometry, side, block.shift_size, shape, difference)


@pytest.mark.parametrize('kind', [SimplifiedWindowAttention, FocusedWindowAttention, SoftmaxWindowAttention])
def test_gradients(kind):
    block = make_block(kind, 3, 1)
    x = torch.randn(2, 4 * 2, HEADS * DIMS, dtype=torch.double, requires_grad=True)
    # Of padding slots too: they hold the bias.
    assert torch.autograd.gradcheck(lambda x, bias: block(x, (4, 2)), (x, block.w_msa.qkv.bias))


def test_a_geometry_made_in_inference_mode_serves_training():
    block = make_block(SoftmaxWindowAttention, 4, 1).train()
    x = torch.randn(1, 65, HEADS * DIMS, dtype=torch.double)
    with torch.inference_mode():
        block(x, (5, 13))
    block(x.requires_grad_(), (5, 13)).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize('kind', [SimplifiedWindowAttention, FocusedWindowAttention])
def test_large_activations_stay_finite_in_half_precision(kind):
    block = make_block(kind, 8, 0).float()
    x = 40 * torch.randn(1, 64, HEADS * DIMS)
    with torch.autocast('cpu', torch.bfloat16), torch.no_grad():
        out = block(x, (8, 8))
    assert out.isfinite().all()
    with torch.no_grad():
        expected = block(x, (8, 8))
    assert (out.float() - expected).norm() < 0.05 * expected.norm()


@torch.no_grad()
def test_cached_bias_follows_the_table_the_size_and_the_mode():
    block = make_block(SoftmaxWindowAttention, 4, 2)
    table = block.w_msa.relative_position_bias_table
    for height, width in ((7, 9), (8, 8), (7, 9)):
        for scale in (1.0, -2.0):
            table.mul_(scale)
            x = torch.randn(1, height * width, HEADS * DIMS, dtype=torch.double)
            torch.testing.assert_close(
                block(x, (height, width)), whole_map(block, x, height, width), rtol=1e-9, atol=1e-9
            )
    table.data = table.data * 3
    block.eval()
    torch.testing.assert_close(block(x, (7, 9)), whole_map(block, x, 7, 9), rtol=1e-9, atol=1e-9)


def test_wrong_arguments():
    with pytest.raises(ValueError, match='does not divide'):
        SimplifiedWindowAttention(10, 3, 7)


def test_without_qkv_bias_padding_is_zero():
    block = make_block(SimplifiedWindowAttention, 4, 0, qkv_bias=False)
    x = torch.randn(1, 35, HEADS * DIMS, dtype=torch.double)
    with torch.no_grad():
        out = block(x, (5, 7))
        block.w_msa.qkv.bias = nn.Parameter(torch.zeros(3 * HEADS * DIMS, dtype=torch.double))
        torch.testing.assert_close(out, whole_map(block, x, 5, 7), rtol=1e-9, atol=1e-9)
