"""Moments of parts, merged, equal the moments of all tokens; tests/distributed merges over processes."""

import numpy as np
import pytest
import torch

from slab_det.recalibration.moments import Moments

C = 3
# One part is a single token, one has none.
COUNTS = (40, 1, 0, 7)


def parts(offset=0.0):
    generator = torch.Generator().manual_seed(0)
    for i, count in enumerate(COUNTS):
        yield torch.randn(count, C, generator=generator, dtype=torch.float64) * (i + 1) + 10 * i + offset


# At 1e6 a sum of squares has lost all digits of a variance of 1 in float32, and six of them in float64.
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize(('offset', 'rtol'), [(0.0, 1e-13), (1e6, 1e-9)])
def test_merged_moments_equal_the_moments_of_all_tokens(offset, rtol, dtype):
    batches, moments = [part.to(dtype) for part in parts(offset)], Moments()
    for batch in batches:
        moments.add(batch[None])
    tokens = np.concatenate([batch.double() for batch in batches])
    assert moments.count == len(tokens)
    np.testing.assert_allclose(moments.mean, tokens.mean(0), rtol=rtol)
    np.testing.assert_allclose(moments.scatter, ((tokens - tokens.mean(0)) ** 2).sum(0), rtol=rtol)
    np.testing.assert_allclose(moments.var, moments.scatter / moments.count)
