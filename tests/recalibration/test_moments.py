"""Moments of parts are those of the union, in float64, against numpy; over processes: tests/distributed."""

import numpy as np
import pytest
import torch
from torch import nn

from slab_det.recalibration.moments import Moments, _prepare_forward

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


def test_image_tensors_go_to_the_device_of_the_model():
    forward = _prepare_forward(nn.Linear(4, 1, device='meta'), (), [])
    assert forward(torch.randn(1, 3, 4, 4)).device.type == 'meta'
