"""UN against an implementation in numpy, written from the paper's formulas."""

import numpy as np
import pytest
import torch

from slab_det.norms import UN

C = 5


class NumpyUN:
    """The formulas over lists of every value ever seen. Iterations count from 1."""

    def __init__(self, weight, bias, window_size, warmup_iters, filter_outliers, momentum=0.1, eps=1e-5):
        self.weight, self.bias = weight, bias
        self.window_size, self.warmup_iters, self.filter_outliers = window_size, warmup_iters, filter_outliers
        self.a, self.eps = 1 - momentum, eps
        self.var, self.psi = np.ones(C), np.zeros(C)
        self.squares, self.gradients, self.fired = [], [], []

    def forward(self, x):
        t, s = len(self.squares) + 1, (x**2).mean(0)
        before = self.squares[-self.window_size :]
        window = np.array([*self.squares, s][-self.window_size :])
        geometric = window.prod(0) ** (1 / len(window))
        fired = False
        if self.filter_outliers and t > self.warmup_iters and len(before) == self.window_size > 1:
            spread = np.sqrt(before).var(ddof=1)
            fired = bool((window.mean(0) - geometric > self.window_size * spread).any())
        self.squares.append(self.var if fired else s)
        self.fired.append(fired)
        s_hat = s if fired or t <= self.warmup_iters else geometric
        self.var = self.a * self.var + (1 - self.a) * s_hat
        root = np.sqrt(s_hat + self.eps)
        return self.weight * (x / root) + self.bias, (x / root, root, fired)

    def backward(self, dy, saved):
        z, root, fired = saved
        g = self.weight * dy
        gs = (g * z).mean(0)
        self.gradients.append(self.psi if fired else gs)
        mean = gs if fired else np.mean(self.gradients[-self.window_size :], 0)
        self.psi = self.a * self.psi + (1 - self.a) * mean
        return (g - z * (gs if fired else self.psi)) / root, (dy * z).sum(0), dy.sum(0)

    def state(self):
        return dict(running_var=self.var, psi=self.psi, iteration=len(self.squares), num_filtered=sum(self.fired))


def make_pair(**options):
    norm = UN(C, **options).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
    options = dict(dict(window_size=4, warmup_iters=4000, filter_outliers=True), **options)
    return norm, NumpyUN(norm.weight.detach().numpy(), norm.bias.detach().numpy(), **options)


def tokens(scale=1.0):
    """Between 1 and 40 tokens; channels of different size; no s below the floor of the geometric mean."""
    x = torch.randn(int(torch.randint(1, 41, ())), C, dtype=torch.double) + 0.3
    return scale * torch.linspace(0.5, 2.0, C).double() * (x + 0.01 * x.sign())


def assert_close(got, wanted, label, rtol=1e-11, atol=1e-12):
    wanted = torch.as_tensor(np.array(wanted))
    torch.testing.assert_close(
        got.detach(), wanted, rtol=rtol, atol=atol, check_dtype=False, msg=lambda text: f'{label}: {text}'
    )


def assert_same_state(norm, oracle, label):
    for name, value in oracle.state().items():
        assert_close(getattr(norm, name), value, f'{label}, {name}')
    for window, seen in ((norm.squares, oracle.squares), (norm.gradients, oracle.gradients)):
        kept = seen[-norm.window_size :]
        assert int(window.count) == len(seen)
        assert_close(window.values[torch.arange(len(seen) - len(kept), len(seen)) % norm.window_size], kept, label)


def assert_step_matches(norm, oracle, x, label):
    x = x.detach().requires_grad_()
    y = norm(x)
    expected, saved = oracle.forward(x.detach().numpy())
    assert_close(y, expected, label, atol=1e-11)
    dy = torch.randn_like(y)
    norm.zero_grad()
    y.backward(dy)
    got = x.grad, norm.weight.grad, norm.bias.grad
    for name, *pair in zip(('dx', 'dweight', 'dbias'), got, oracle.backward(dy.numpy(), saved), strict=True):
        assert_close(*pair, f'{label}, {name}', rtol=1e-10, atol=1e-11)
    assert_same_state(norm, oracle, label)


@pytest.mark.parametrize(
    'options',
    [
        dict(warmup_iters=0),
        dict(warmup_iters=10),
        dict(warmup_iters=100),
        dict(window_size=1, warmup_iters=3),
        dict(window_size=7, warmup_iters=2, momentum=0.3, eps=1e-3),
        dict(warmup_iters=5, filter_outliers=False),
    ],
    ids=str,
)
def test_every_iteration_matches_the_oracle(options):
    """Batches of 1 to 40 tokens, some of them 6 times as large: warm-up, both outcomes of the filter, wrap-around."""
    norm, oracle = make_pair(**options)
    for t in range(1, 46):
        assert_step_matches(norm, oracle, tokens(scale=6.0 if t % 11 == 0 else 1.0), f'{options}, t = {t}')
    after_warmup = oracle.fired[oracle.warmup_iters + 1 :]
    filters = options.get('filter_outliers', True) and oracle.window_size > 1
    if filters and after_warmup:
        assert any(after_warmup) and not all(after_warmup), 'the inputs must fire the filter, and not always'
    else:
        assert not any(oracle.fired)


def test_a_backward_uses_the_decision_of_its_own_forward():
    norm, oracle = make_pair(warmup_iters=0)
    for t in range(1, 7):
        assert_step_matches(norm, oracle, torch.ones(3, C).double() * torch.linspace(1, 2, C), f't = {t}')
    xs = [(scale * torch.linspace(1, 2, C) * torch.ones(4, C)).double().requires_grad_() for scale in (50, 1.01, 1)]
    ys = [norm(x) for x in xs]
    saved = [oracle.forward(x.detach().numpy())[1] for x in xs]
    assert [s[2] for s in saved] == [True, False, False]
    # Not in the order of the forwards.
    for index in (2, 0, 1):
        dy = torch.randn(4, C).double()
        ys[index].backward(dy)
        dx, *_ = oracle.backward(dy.numpy(), saved[index])
        assert_close(xs[index].grad, dx, index, rtol=1e-10)
        assert_same_state(norm, oracle, index)


def test_a_batch_of_zeros_leaves_the_next_ones_finite():
    norm = UN(C, warmup_iters=0, filter_outliers=False)
    for t in range(7):
        y = norm(torch.zeros(3, C) if t == 2 else torch.ones(3, C))
        assert y.abs().max() < 20, (t, y)
    torch.testing.assert_close(y, torch.ones(3, C), rtol=1e-4, atol=0)
