"""Moments of parts are moments of the union, in float64, against numpy on all tokens at once."""

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from slab_det.recalibration.moments import Moments, merge_moments, pool_moments, pool_over_ranks

C = 3
# One part is a single token, one has none.
COUNTS = (40, 1, 0, 7)


def parts(offset=0.0):
    generator = torch.Generator().manual_seed(0)
    for i, count in enumerate(COUNTS):
        x, noise = torch.randn(2, count, C, generator=generator, dtype=torch.float64)
        yield x * (i + 1) + 10 * i + offset, noise - 0.5 * x * i + offset


def expected(quantities):
    tokens = np.stack([np.concatenate([part[i] for part in quantities]) for i in range(len(quantities[0]))])
    mean = tokens.mean(1)
    deviations = tokens - mean[:, None]
    return tokens.shape[1], mean, np.einsum('anc,bnc->abc', deviations, deviations)


def assert_moments(found, wanted, rtol=1e-13):
    count, mean, scatter = wanted
    assert found.count == count
    np.testing.assert_allclose(found.mean, mean, rtol=rtol)
    np.testing.assert_allclose(found.scatter, scatter, rtol=rtol, atol=rtol * abs(scatter).max())


# At 1e6 a sum of squares has lost all digits of a variance of 1 in float32, and six of them in float64.
@pytest.mark.parametrize(('offset', 'rtol'), [(0.0, 1e-13), (1e6, 1e-9)])
def test_moments_of_batches_are_those_of_all_tokens(offset, rtol):
    quantities = list(parts(offset))
    both, single = Moments(), Moments()
    for x, y in quantities:
        both.add(x[None], y[None])
        single.add(x)
    assert_moments(both, expected(quantities), rtol)
    assert_moments(single, expected([(x,) for x, _ in quantities]), rtol)
    np.testing.assert_allclose(both.var, both.scatter[[0, 1], [0, 1]] / both.count)


def test_float32_tokens_are_summed_in_float64_and_left_as_they_are():
    x = 1000 + torch.randn(5000, C)
    before = x.clone()
    moments = Moments()
    for batch in x.split(7):
        moments.add(batch)
    assert torch.equal(x, before) and moments.mean.dtype == moments.scatter.dtype == torch.float64
    assert_moments(moments, expected([(x.double(),)]), 1e-11)


def test_no_token_at_all_leaves_nothing():
    moments = Moments()
    moments.add(torch.zeros(2, 0, C))
    moments.merge(Moments())
    assert moments.count == 0
    count, mean, scatter = merge_moments(torch.zeros(2, 1), torch.zeros(2, 1, C), torch.zeros(2, 1, 1, C))
    assert not count.any() and not mean.any() and not scatter.any(), 'and no NaN'


def test_merging_does_not_change_what_is_merged():
    first, second = Moments(), Moments()
    x, y, _, z = (x for x, _ in parts())
    first.add(x)
    second.merge(first)
    second.add(y)
    second.add(z)
    assert_moments(first, expected([(x,)]))


def _pool_on_rank(rank, world_size, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=world_size)
    # Another split than by parts; the third process has no token.
    quantities = [[], list(parts())[:1], [], list(parts())[1:]][rank + 1]
    wide, narrow = Moments(), Moments()
    for x, y in quantities:
        wide.add(x, y)
        narrow.add(x[:, :1], y[:, :1])
    pool_over_ranks([wide, narrow], [C, 1], 2, torch.device('cpu'))
    x = torch.cat([x for x, _ in quantities]) if quantities else torch.zeros(0, C).double()
    mean = x.mean(0) if len(x) else torch.zeros(C).double()
    single = pool_moments(mean.new_full((1,), len(x)), mean, (x - mean).square().sum(0))
    torch.save([(m.count, m.mean, m.scatter) for m in (wide, narrow)] + [single], f'{folder}/{rank}.pt')
    torch.distributed.destroy_process_group()


def test_processes_find_the_moments_of_all_their_tokens(tmp_path):
    # Forked: a new process would import torch for seconds.
    mp.start_processes(_pool_on_rank, (3, str(tmp_path)), nprocs=3, start_method='fork')
    ranks = [torch.load(tmp_path / f'{rank}.pt') for rank in range(3)]
    quantities = list(parts())
    count, mean, scatter = expected(quantities)
    for found in ranks:
        for pooled, c in zip(found, (C, 1), strict=False):
            moments = Moments()
            moments.count, moments.mean, moments.scatter = pooled
            assert_moments(moments, (count, mean[:, :c], scatter[:, :, :c]))
        single = Moments()
        single.count, single.mean, single.scatter = (
            found[2][0].unique().item(),
            found[2][1][None],
            found[2][2][None, None],
        )
        assert_moments(single, (count, mean[:1], scatter[:1, :1]))
    for other in ranks[1:]:
        for a, b in zip(ranks[0], other, strict=True):
            assert a[0] == b[0] if isinstance(a[0], int) else torch.equal(a[0], b[0])
            assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]), 'to the last bit'
