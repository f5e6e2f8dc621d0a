"""Moments of parts are moments of the union, in float64, against numpy on all tokens at once."""

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from slab_det.recalibration.moments import Moments, pool_over_ranks

C = 3
# One part is a single token, one has none.
COUNTS = (40, 1, 0, 7)


def parts(offset=0.0):
    generator = torch.Generator().manual_seed(0)
    for i, count in enumerate(COUNTS):
        x, noise = torch.randn(2, count, C, generator=generator, dtype=torch.float64)
        yield x * (i + 1) + 10 * i + offset, noise - 0.5 * x * i + offset


def expected(quantities):
    tokens = np.stack([np.concatenate([part[i].double() for part in quantities]) for i in range(len(quantities[0]))])
    mean = tokens.mean(1)
    deviations = tokens - mean[:, None]
    return tokens.shape[1], mean, np.einsum('anc,bnc->abc', deviations, deviations)


def assert_moments(found, wanted, rtol=1e-13):
    count, mean, scatter = wanted
    assert found.count == count
    np.testing.assert_allclose(found.mean, mean, rtol=rtol)
    np.testing.assert_allclose(found.scatter, scatter, rtol=rtol, atol=rtol * abs(scatter).max())


# At 1e6 a sum of squares has lost all digits of a variance of 1 in float32, and six of them in float64.
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize(('offset', 'rtol'), [(0.0, 1e-13), (1e6, 1e-9)])
def test_moments_of_batches_are_those_of_all_tokens(offset, rtol, dtype):
    quantities = [tuple(values.to(dtype) for values in part) for part in parts(offset)]
    both, single = Moments(), Moments()
    for x, y in quantities:
        both.add(x[None], y[None])
        single.add(x)
    assert_moments(both, expected(quantities), rtol)
    assert_moments(single, expected([(x,) for x, _ in quantities]), rtol)
    np.testing.assert_allclose(both.var, both.scatter[[0, 1], [0, 1]] / both.count)


def _pool_on_rank(rank, world_size, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=world_size)
    # Another split than by parts; the third process has no token, and nobody has one of the last moments.
    quantities = [[], list(parts())[:1], [], list(parts())[1:]][rank + 1]
    wide, narrow, none = Moments(), Moments(), Moments()
    for x, y in quantities:
        wide.add(x, y)
        narrow.add(x[:, :1])
    pooled = pool_over_ranks([wide, narrow, none])
    torch.save([(m.count, m.mean, m.scatter) for m in pooled], f'{folder}/{rank}.pt')
    torch.distributed.destroy_process_group()


def test_processes_find_the_moments_of_all_their_tokens(tmp_path):
    # Forked: a new process would import torch for seconds.
    mp.start_processes(_pool_on_rank, (3, str(tmp_path)), nprocs=3, start_method='fork')
    ranks = [torch.load(tmp_path / f'{rank}.pt') for rank in range(3)]
    count, mean, scatter = expected(list(parts()))
    for found in ranks:
        for pooled, k, c in zip(found, (2, 1), (C, 1), strict=False):
            moments = Moments()
            moments.count, moments.mean, moments.scatter = pooled
            assert_moments(moments, (count, mean[:k, :c], scatter[:k, :k, :c]))
        assert found[2] == (0, None, None)
        for (_, *ours), (_, *firsts) in zip(found[:2], ranks[0][:2], strict=True):
            assert all(map(torch.equal, ours, firsts)), 'to the last bit'
