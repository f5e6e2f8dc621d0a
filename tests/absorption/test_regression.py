"""Ridge regression from sums over tokens, against least squares on the tokens themselves."""

import pytest
import torch

from slab_det.absorption.channels import elimination
from slab_det.absorption.channels.elimination import lost_logits, rank_channels, reduce_rank
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.regression import RIDGES, Split, diagonal_fit, ridge_fits


def tokens(count=600, noise=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 9.0, 0.1, 2.0, 3.0])
    matrix = torch.randn(4, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y = (x + 7) @ matrix.T + 2
    return x + 7, y + noise * torch.randn(y.shape, generator=generator, dtype=torch.float64), matrix


def moments_of(x, y, *cuts, int8=False):
    moments = CrossMoments(int8)
    for x_part, y_part in zip(x.tensor_split(cuts), y.tensor_split(cuts), strict=True):
        moments.add(x_part[None], y_part[None])
    return moments


def test_batches_of_any_size_give_the_moments_of_all_tokens():
    x, y, _ = tokens(noise=1.0)
    whole, parts = moments_of(x, y), moments_of(x, y, 1, 17, 400)
    for name, value in vars(whole).items():
        torch.testing.assert_close(torch.as_tensor(getattr(parts, name)), torch.as_tensor(value), rtol=1e-12, atol=1e-9)
    deviations = x - x.mean(0)
    torch.testing.assert_close(whole.xx, deviations.T @ deviations)


def test_moments_of_float32_tokens_match_float64():
    """Channels span several blocks, and some vary little about a large mean; errors are relative to the deviations."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 600, generator=generator) * torch.logspace(-2, 2, 600) + 30
    y = torch.randn(5000, 20, generator=generator) + x[:, :20]
    found, expected = moments_of(x, y, 700), moments_of(x.double(), y.double())
    scale_x, scale_y = expected.xx.diagonal().sqrt(), expected.yy.sqrt()
    for name, scale in dict(xx=scale_x[:, None] * scale_x, xy=scale_x[:, None] * scale_y, yy=scale_y.square()).items():
        error = (getattr(found, name) - getattr(expected, name)).abs() / scale
        assert error.max() < 1e-5, name
    deviations = x.double() - x.double().mean(0)
    torch.testing.assert_close(expected.xx, deviations.T @ deviations)


@pytest.mark.parametrize('int8', [False, True])
def test_a_ridge_fit_minimises_its_objective(int8):
    """The oracle is least squares on the standardised tokens, with the penalty as additional rows."""
    x, y, _ = tokens(noise=3.0)
    prior = torch.randn(4, 5, dtype=torch.float64)
    sigma, ridge = x.std(0, correction=0), 0.3
    rounding = int8 * ((x.max() - x.min().clamp(max=0)) * 2 / 255) ** 2 / 12
    pull = (len(x) * (ridge + rounding / sigma**2)).sqrt().diag()
    rows = torch.cat([(x - x.mean(0)) / sigma, pull])
    targets = torch.cat([y - y.mean(0), pull @ (prior * sigma).T])
    expected = torch.linalg.lstsq(rows, targets).solution.T / sigma
    (fit,) = ridge_fits(moments_of(x, y, int8=int8), prior, (ridge,))
    torch.testing.assert_close(fit.matrix, expected)
    torch.testing.assert_close(x.mean(0) @ fit.matrix.T + fit.shift, y.mean(0))


def test_unexplained_is_the_squared_error_over_the_variance():
    x, y, _ = tokens(noise=3.0)
    (fit,) = ridge_fits(moments_of(x, y), torch.zeros(4, 5, dtype=torch.float64), (1.0,))
    other_x, other_y, _ = tokens(count=50, noise=3.0, seed=1)
    residual = other_y - other_x @ fit.matrix.T - fit.shift
    expected = residual.square().sum() / (other_y - other_y.mean(0)).square().sum()
    assert moments_of(other_x, other_y).unexplained(fit) == pytest.approx(float(expected))


def test_an_exact_map_is_found_and_a_constant_channel_keeps_its_prior():
    x, _, matrix = tokens()
    x[:, 2] = 7.0
    prior = torch.ones(4, 5, dtype=torch.float64)
    (fit,) = ridge_fits(moments_of(x, x @ matrix.T), prior, (1e-6,))
    others = [0, 1, 3, 4]
    torch.testing.assert_close(fit.matrix[:, others], matrix[:, others], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fit.matrix[:, 2], prior[:, 2])


def chosen_ridge(moments, held_out, prior):
    fit = Split(moments, held_out).choose_fit(prior)
    return next(r for r in RIDGES if torch.equal(next(ridge_fits(moments, prior, (r,))).matrix, fit.matrix))


def test_held_out_tokens_choose_the_ridge():
    """With few noisy tokens and a true prior the largest ridge is best; with many exact tokens and a wrong prior the
    smallest."""
    x, y, matrix = tokens(count=8, noise=20.0)
    held_out = moments_of(*tokens(seed=1)[:2])
    assert chosen_ridge(moments_of(x, y), held_out, matrix) == max(RIDGES)
    x, y, matrix = tokens()
    assert chosen_ridge(moments_of(x, y), held_out, 0 * matrix) == min(RIDGES)


def test_the_largest_ridge_with_nearly_the_least_error_is_chosen():
    """Two channels are nearly equal: the fit with the least error on held-out tokens has large weights on both, which
    cancel and hardly reduce the error."""
    x, y, matrix = tokens(count=4000, noise=1.0)
    x = torch.cat([x, x[:, :1] + 1e-2 * x[:, 1:2] * x[:, 2:3]], 1)
    moments, held_out = moments_of(x[::2], y[::2]), moments_of(x[1::2], y[1::2])
    prior = 0 * y[:1].T @ x[:1]
    left = {ridge: held_out.unexplained(next(ridge_fits(moments, prior, (ridge,)))) for ridge in RIDGES}
    ridge = chosen_ridge(moments, held_out, prior)
    assert left[ridge] <= 1.05 * min(left.values()) < left[RIDGES[RIDGES.index(ridge) + 1]]
    assert ridge > min(left, key=left.get)


def to_bfloat16(x):
    return x.bfloat16()


def to_int8(x):
    step = (x.max() - x.min()) / 255
    return (x / step).round() * step


@pytest.mark.parametrize(('rounded', 'bound'), [(to_bfloat16, 0.01), (to_int8, 0.03)])
def test_fit_survives_low_precision(rounded, bound):
    """The target is 1,000 times the small difference of two channels: exact weights would amplify the rounding of these
    channels to errors as large as the target."""
    x, _, _ = tokens(count=4000)
    x -= 7
    x[:, 1] = x[:, 0] + x[:, 1] / 1000
    y = 1000 * (x[:, :1] - x[:, 1:2])
    moments = moments_of(x, y, int8=rounded is to_int8)
    fit = Split(moments, moments).choose_fit(torch.zeros(1, 5, dtype=torch.float64))
    assert moments_of(rounded(x), y).unexplained(fit) < moments.unexplained(fit) + bound


def test_diagonal_fit_is_a_layer_norm_of_constant_scale():
    x, _, _ = tokens()
    scale = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    y = (x - x.mean(1, keepdim=True)) * scale + 1
    moments = moments_of(x, y)
    fit = diagonal_fit(moments)
    torch.testing.assert_close(x @ fit.matrix.T + fit.shift, y)
    assert moments.unexplained(fit) < 1e-12


def test_a_weight_counts_tokens_several_times():
    x, y, _ = tokens(count=50, noise=1.0)
    times = torch.arange(50) % 3
    weighted = CrossMoments()
    weighted.add(x[None], y[None], times.double()[None, :, None])
    for name, value in vars(moments_of(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))).items():
        torch.testing.assert_close(torch.as_tensor(getattr(weighted, name)).double(), torch.as_tensor(value).double())


@pytest.fixture
def no_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, 'RIDGE', 0.0)


def test_channels_are_ranked_by_backward_elimination(no_ridge):
    """The oracle runs one regression for each set of remaining channels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 9, generator=generator, dtype=torch.float64) @ torch.randn(9, 9, dtype=torch.float64)
    y = torch.randn(500, 3, generator=generator, dtype=torch.float64) + x[:, [1, 4, 6]]
    centred_x, centred_y, left, order = x - x.mean(0), y - y.mean(0), list(range(9)), []
    while left:
        losses = {}
        for channel in left:
            others = centred_x[:, [other for other in left if other != channel]]
            losses[channel] = (centred_y - others @ torch.linalg.lstsq(others, centred_y).solution).square().sum()
        order.append(min(losses, key=losses.get))
        left.remove(order[-1])
    assert rank_channels(moments_of(x, y))[0].tolist() == order


def test_changed_targets_and_selected_channels_give_the_moments_of_their_tokens():
    x, y, matrix = tokens(noise=1.0)
    weight, bias = matrix, torch.ones(4, dtype=torch.float64)
    changed = moments_of(x, y).with_target(weight, bias)
    for name, value in vars(moments_of(x, x @ weight.T + bias)).items():
        torch.testing.assert_close(torch.as_tensor(getattr(changed, name)), torch.as_tensor(value))
    some = torch.tensor([3, 0])
    for name, value in vars(moments_of(x[:, some], y)).items():
        torch.testing.assert_close(
            torch.as_tensor(getattr(moments_of(x, y).select(some), name)), torch.as_tensor(value)
        )


def test_one_channel_of_each_equal_pair_is_removed_first():
    """Of 200 pairs of nearly equal channels, the first 200 channels removed are one of each pair."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 200, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x + 1e-3 * torch.randn(2000, 200, generator=generator, dtype=torch.float64)], 1)
    y = x[:, :200] @ torch.randn(200, 5, generator=generator, dtype=torch.float64)
    first = rank_channels(moments_of(x, y))[0][:200]
    assert len({*(first % 200).tolist()}) == 200


@pytest.mark.parametrize(('heads', 'columns'), [(1, 1), (3, 1), (1, 2)])
def test_channels_are_ranked_with_their_columns_and_one_in_each_head(no_ridge, heads, columns):
    """The oracle runs one regression for each set of channels that stay."""
    x = torch.randn(500, 6 * columns, dtype=torch.float64) @ torch.randn(6 * columns, 6 * columns, dtype=torch.float64)
    y = x @ torch.randn(6 * columns, 3, dtype=torch.float64)
    x, y = x - x.mean(0), y - y.mean(0)

    def loss(channels):
        some = x.unflatten(1, (6, columns))[:, sorted(channels)].flatten(1)
        return float((y - some @ torch.linalg.lstsq(some, y).solution).square().sum()) if channels else y.square().sum()

    order, added = rank_channels(moments_of(x, y), heads, columns)
    left = {*range(6)}
    for start in range(0, 6, heads):
        parts = [[c for c in left if c // (6 // heads) == head] for head in range(heads)]
        gone = {min(part, key=lambda c: loss(left - {c})) for part in parts}
        assert {*order[start : start + heads].tolist()} == gone
        left -= gone
        torch.testing.assert_close(float(added[start + heads - 1]), float(loss(left)), rtol=1e-6, atol=1e-6)


def test_queries_and_keys_of_full_rank_keep_their_logits_and_a_lower_rank_loses_the_least():
    """The oracle is the best approximation of the matrix of logits; the softmax ignores a constant of each query."""
    heads, dims, channels = 2, 4, 6
    tokens_q, tokens_k = (
        torch.randn(300, channels, dtype=torch.float64),
        torch.randn(200, channels, dtype=torch.float64),
    )
    weight, bias = torch.randn(3 * heads * dims, channels, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    moments = moments_of(tokens_q, tokens_q[:, :1]), moments_of(tokens_k, tokens_k[:, :1])

    def logits(weight, bias):
        q, k, _ = (part.unflatten(0, (heads, dims)) for part in torch.cat([weight, bias[:, None]], 1).split(8))
        q, k = (
            torch.einsum('nc,hdc->hnd', torch.cat([x, torch.ones_like(x[:, :1])], 1), part)
            for x, part in ((tokens_q, q), (tokens_k, k))
        )
        found = q @ k.transpose(1, 2)
        return found - found.mean(-1, keepdim=True)

    before = logits(weight, bias)
    lost = lost_logits(*moments, weight, bias, heads)
    for rank in (4, 2):
        values = weight.clone(), bias.clone(), bias.clone()
        reduce_rank(*moments, *values[:2], heads, rank, padding=values[2])
        assert not any(x.unflatten(0, (3, heads, dims))[:2, :, rank:].any() for x in values)
        assert torch.equal(values[1], values[2]) and torch.equal(values[0][16:], weight[16:])
        errors = (logits(*values[:2]) - before).square().mean((1, 2))
        least = torch.linalg.svdvals(before)[:, rank:].square().sum(1) / before[0].numel()
        torch.testing.assert_close(errors, least)
        torch.testing.assert_close(lost[:, rank], least)


@pytest.mark.parametrize('int8', [False, True])
def test_merged_sums_are_those_over_all_tokens(int8):
    x, y = torch.randn(50, 4).double() + 2, torch.randn(50, 3).double() - 1
    parts = [CrossMoments(int8) for _ in range(4)]
    for moments, tokens in zip(parts, (slice(30), slice(30, None), slice(None), slice(0)), strict=True):
        moments.add(x[tokens], y[tokens])
    first, second, whole, nothing = parts
    before = first.xx.clone()
    for name in ('count', 'mean_x', 'mean_y', 'xx', 'xy', 'yy', 'low', 'high'):
        merged, expected = (torch.as_tensor(getattr(part, name)) for part in (first.merge(second), whole))
        torch.testing.assert_close(merged, expected, check_dtype=False)
    assert torch.equal(first.xx, before) and first.merge(nothing) is first is nothing.merge(first)
