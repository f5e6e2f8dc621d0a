"""Attention as matrices: what the module computes is the matrix times the values, and the matrix is the formula's."""

import pytest
import torch
from torch import nn

from slab_det.attention.attention_matrix import attention_matrices, without_convolution
from slab_det.attention.geometry import window_geometry
from slab_det.attention.spatial_reduction import MAP_ATTENTIONS
from slab_det.attention.window_attention import ATTENTIONS

HEADS, DIMS, SIDE = 2, 3, 4
CHANNELS = range(HEADS * DIMS)


def random_attention(kind: type, *args: object, **kwargs: object) -> nn.Module:
    attention = kind(HEADS * DIMS, HEADS, *args, **kwargs).double().eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.7)
    return attention


def window_mixer(attention: nn.Module, q: torch.Tensor, k: torch.Tensor, shifted: bool = False):
    geometry = window_geometry(SIDE, SIDE, SIDE, SIDE // 2 if shifted else 0, q.device)
    return lambda v: attention(q.expand(len(v), -1, -1).clone(), k.expand(len(v), -1, -1).clone(), v, geometry, shifted)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(1, count, HEADS * DIMS, dtype=torch.double)


def apply(found: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """The matrices times the values (M, C), channel by channel."""
    return torch.stack(
        [matrix @ values[:, c] + offset for c, (matrix, offset) in enumerate(zip(*found, strict=True))], 1
    )


@pytest.mark.parametrize('shifted', [False, True])
@pytest.mark.parametrize('word', ATTENTIONS)
@torch.no_grad()
def test_window_attention_is_its_matrix_times_the_values(word: str, shifted: bool) -> None:
    attention = random_attention(ATTENTIONS[word], SIDE)
    q, k, v = (tokens(SIDE**2) for _ in range(3))
    mix = window_mixer(attention, q, k, shifted)
    found = attention_matrices(mix, v[0], CHANNELS)
    torch.testing.assert_close(apply(found, v[0]), mix(v)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize('ratio', [1, 2])
@pytest.mark.parametrize('word', MAP_ATTENTIONS)
@torch.no_grad()
def test_map_attention_is_its_matrix_times_the_values(word: str, ratio: int) -> None:
    """Also where values are reduced and interpolated back for the convolution: N = 24 queries, M = 6 values."""
    special = {} if word == 'softmax' else {'source_shape': (3, 3)}
    attention = random_attention(MAP_ATTENTIONS[word], sr_ratio=ratio, **special)
    shape, source = (4, 6), (4 // ratio, 6 // ratio)
    q, k, v = tokens(24), tokens(source[0] * source[1]), tokens(source[0] * source[1])

    def mix(values: torch.Tensor) -> torch.Tensor:
        return attention.mix(q.repeat(len(values), 1, 1), k.repeat(len(values), 1, 1), values, shape, source)

    found = attention_matrices(mix, v[0], CHANNELS)
    assert found.matrices.shape == (HEADS * DIMS, 24, 24 // ratio**2)
    torch.testing.assert_close(apply(found, v[0]), mix(v)[0], rtol=1e-12, atol=1e-13)


def convolution_matrix(kernel: torch.Tensor) -> torch.Tensor:
    """A 5x5 convolution of a (w, w) image, padded by 2, as the (N, N) matrix that it is: tap by tap."""
    matrix = torch.zeros(SIDE**2, SIDE**2, dtype=torch.double)
    for row in range(SIDE):
        for column in range(SIDE):
            for down in range(-2, 3):
                for right in range(-2, 3):
                    if 0 <= row + down < SIDE and 0 <= column + right < SIDE:
                        matrix[row * SIDE + column, (row + down) * SIDE + column + right] = kernel[down + 2, right + 2]
    return matrix


def focused(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    x = (torch.clamp(x, min=0) + 1e-6) / torch.log1p(torch.exp(theta))
    return x**3 * (x.pow(2).sum(-1, keepdim=True) / x.pow(6).sum(-1, keepdim=True)).sqrt()


@pytest.mark.parametrize('word', ATTENTIONS)
@torch.no_grad()
def test_the_matrix_is_that_of_the_formula(word: str) -> None:
    attention = random_attention(ATTENTIONS[word], SIDE)
    q, k, v = (tokens(SIDE**2) for _ in range(3))
    total = attention_matrices(window_mixer(attention, q, k), v[0], CHANNELS)
    expected = []
    for c in CHANNELS:
        head = slice(c // DIMS * DIMS, c // DIMS * DIMS + DIMS)
        if word == 'softmax':
            places = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing='ij')).flatten(1)
            row, column = places[:, :, None] - places[:, None, :] + SIDE - 1
            bias = attention.relative_position_bias_table[row * (2 * SIDE - 1) + column, c // DIMS]
            expected.append((q[0, :, head] @ k[0, :, head].T / DIMS**0.5 + bias).softmax(-1))
            continue
        keys = k[0] + attention.positional_encoding[0]
        if word == 'sla':
            queries, keys, epsilon = q[0].clamp(min=0), keys.clamp(min=0), 1e-6
        else:
            # The authors take means over the keys: the 1e-6 weighs N times as much.
            theta = attention.scale[0, 0]
            queries, keys, epsilon = focused(q[0], theta), focused(keys, theta), 1e-6 * SIDE**2
        weights = queries[:, head] @ keys[:, head].T
        expected.append(weights / (weights.sum(1, keepdim=True) + epsilon))
    expected = torch.stack(expected)
    if word == 'softmax':
        torch.testing.assert_close(total.matrices, expected, rtol=1e-10, atol=1e-13)
        assert not total.offsets.any()
        return
    alone = attention_matrices(window_mixer(without_convolution(attention), q, k), v[0], CHANNELS)
    torch.testing.assert_close(alone.matrices, expected, rtol=1e-10, atol=1e-13)
    local = torch.stack([convolution_matrix(attention.dwc.weight[c % DIMS, 0]) for c in CHANNELS])
    torch.testing.assert_close(total.matrices, expected + local, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(
        total.offsets, attention.dwc.bias.repeat(HEADS)[:, None].expand(-1, SIDE**2), rtol=1e-12, atol=1e-13
    )
    assert not alone.offsets.any() and attention.dwc.weight.any(), 'the original keeps its convolution'


@torch.no_grad()
def test_channels_are_those_asked_for_and_chunks_leave_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = random_attention(ATTENTIONS['sla'], SIDE)
    q, k, v = (tokens(SIDE**2) for _ in range(3))
    mix = window_mixer(attention, q, k)
    whole = attention_matrices(mix, v[0], CHANNELS)
    # Five values at a time: 16 = 5 + 5 + 5 + 1.
    monkeypatch.setattr('slab_det.attention.attention_matrix._CHUNK_ELEMENTS', 5 * 6 * 32)
    some = attention_matrices(mix, v[0], [4, 1])
    torch.testing.assert_close(some.matrices, whole.matrices[[4, 1]], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(some.offsets, whole.offsets[[4, 1]])


def test_softmax_has_no_convolution_to_leave_out() -> None:
    with pytest.raises(TypeError, match='SoftmaxWindowAttention has no convolution'):
        without_convolution(random_attention(ATTENTIONS['softmax'], SIDE))
