"""MABN and PowerNorm against their formulas in numpy; behaviour that UN shares with them."""

import copy

import numpy as np
import pytest
import torch
from conftest import differing
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from slab_det.norms import MABN, UN, PowerNorm

C = 5
NORMS = [UN, MABN, PowerNorm]


def make_norm(kind, **options):
    """A norm whose warm-up has two iterations; MABN's window holds two iterations."""
    options = {**dict(warmup_iters=2), **(dict(window_size=2) if kind is MABN else {}), **options}
    norm = kind(C, **options).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_var):
            tensor.copy_(torch.rand(C, generator=generator) + 0.5)
    return norm


def batch(t, *shape):
    """Tokens of iteration t; every sixth is so large that UN's filter fires."""
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(*(shape or (2, 7)), C, generator=generator, dtype=torch.double) + 0.5
    return x * (30.0 if t % 6 == 0 else 1.0)


def step(norm, t, run=None):
    """One forward and backward; returns output and input gradient."""
    x = batch(t).requires_grad_()
    y = run(norm, x) if run else norm(x)
    (y.sin() * (1 + t)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize(
    'options',
    [
        dict(kind=MABN),
        dict(kind=MABN, window_size=1, momentum=0.02),
        dict(kind=MABN, window_size=7, warmup_iters=12),
        dict(kind=PowerNorm),
        dict(kind=PowerNorm, momentum=0.3, eps=1e-3, warmup_iters=0),
    ],
    ids=str,
)
def test_every_iteration_matches_the_formulas(options):
    norm = make_norm(**options)
    kind, a = options['kind'], 1 - norm.momentum
    weight, bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    var, psi, seen = norm.running_var.numpy().copy(), np.zeros(C), []
    generator = np.random.default_rng(0)
    for t in range(1, 26):
        values, dy = generator.normal(0.5, 2, (2, generator.integers(1, 30), C))
        x = torch.from_numpy(values).requires_grad_()
        norm.zero_grad()
        y = norm(x)
        y.backward(torch.from_numpy(dy))

        s = (values**2).mean(0)
        var = a * var + (1 - a) * s
        root = np.sqrt((s if t <= norm.warmup_iters else var) + norm.eps)
        z = values / root
        seen.append((weight * dy * z).mean(0))
        psi = np.mean(seen[-norm.window_size :], 0) if kind is MABN else a * psi + (1 - a) * seen[-1]
        for name, got, wanted in (
            ('y', y, weight * z + bias),
            ('dx', x.grad, (weight * dy - z * psi) / root),
            ('dweight', norm.weight.grad, (dy * z).sum(0)),
            ('dbias', norm.bias.grad, dy.sum(0)),
            ('running_var', norm.running_var, var),
            ('psi', norm.psi, psi),
        ):
            torch.testing.assert_close(
                got.detach(),
                torch.from_numpy(wanted),
                rtol=1e-11,
                atol=1e-11,
                msg=lambda text, name=name, t=t: f'{options}, t = {t}, {name}: {text}',
            )
    assert norm.iteration == 25


@pytest.mark.parametrize(
    'options', [dict(kind=UN, window_size=1), dict(kind=MABN, window_size=1), dict(kind=PowerNorm)], ids=str
)
@pytest.mark.parametrize('shape', [(6,), (2, 3), (1, 2, 1)])
def test_gradient_is_exact_without_memory(options, shape):
    """With M = 1 and a = 0 nothing is averaged over iterations, and the backward pass is the exact gradient."""
    norm = make_norm(momentum=1.0, **options)
    for norm.warmup_iters in (1000, 0):
        assert torch.autograd.gradcheck(norm, batch(1, *shape).requires_grad_())


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('kind', NORMS)
def test_recomputation_changes_no_output_gradient_or_state(kind, reentrant):
    """The recomputed forward normalises as the first forward did, although the windows have moved on."""

    def run(norm, x):
        return checkpoint(norm, x, use_reentrant=reentrant)

    plain, recomputed = make_norm(kind), make_norm(kind)
    for t in range(1, 14):
        for got, wanted in zip(step(recomputed, t, run), step(plain, t), strict=True):
            assert torch.equal(got, wanted), t
        assert not differing(plain, recomputed), t
        assert torch.equal(plain.weight.grad, recomputed.weight.grad)
    if kind is UN:
        assert 2 <= plain.num_filtered < 11, 'the filter must both pass and drop'


def test_torch_compile_makes_no_graph_for_each_iteration():
    """As with mmengine's ``compile=True``. Counters are Python numbers, which a graph would hold as constants."""

    def run(norm, x):
        return norm(x.sin()).cos()

    torch._dynamo.reset()
    eager, traced, graphs = make_norm(UN), make_norm(UN), []
    # Traces and guards as every backend, and needs no C++ compiler.
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(run, backend=counter)
    for t in range(1, 8):
        for got, wanted in zip(step(traced, t, compiled), step(eager, t, run), strict=True):
            torch.testing.assert_close(got, wanted)
        assert traced.iteration == t
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] > 0


@pytest.mark.parametrize('kind', NORMS)
def test_reset_starts_everything_but_the_running_variance_again(kind):
    norm = make_norm(kind)
    fresh = copy.deepcopy(norm)
    for t in range(1, 9):
        step(norm, t)
    fresh.running_var.copy_(norm.running_var)
    norm.reset_state()
    assert not differing(norm, fresh)


@pytest.mark.parametrize('kind', NORMS)
def test_norms_take_one_token_and_maps_that_are_not_contiguous(kind):
    norms = [make_norm(kind) for _ in range(3)]
    for t in range(1, 8):
        x = batch(t, 2, 3, 4)
        inputs = x, x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), x.flatten(0, 2)
        ys = [norm(part) for norm, part in zip(norms, inputs, strict=True)]
        for y in ys[1:]:
            torch.testing.assert_close(y.view_as(x), ys[0])
    single = make_norm(kind)
    torch.testing.assert_close(single(torch.full((C,), 3.0).double()), single.weight + single.bias, rtol=1e-5, atol=0)


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
@pytest.mark.parametrize('kind', NORMS)
def test_running_averages_replace_batch_means_that_are_not_finite(kind, bad):
    """Per channel, in the forward and in the backward pass; the other channels use the batch."""
    norm, untroubled = make_norm(kind), make_norm(kind)
    for t in range(1, 6):
        x, dy = batch(t), batch(t + 10)
        untroubled(x).backward(dy)
        if t == 2:
            before = norm.running_var.clone()
            x[0, 2, 1] = bad
        elif t == 3:
            dy[0, 2, 1] = bad
        norm(x).backward(dy)
        if t == 2:
            # UN's running variance averages a geometric mean, and not the replaced value itself.
            assert kind is UN or torch.equal(norm.running_var[1], before[1])
    others = [0, 2, 3, 4]
    for key, value in norm.named_buffers():
        assert value.isfinite().all(), key
        wanted = untroubled.get_buffer(key)
        assert torch.equal(value[..., others], wanted[..., others]) if value.ndim else value == wanted, key
