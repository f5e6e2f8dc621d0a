"""MABN and PowerNorm against lists in numpy; what they and UN have in common."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.checkpoint import checkpoint

from slab_det.norms import MABN, UN, PowerNorm

C = 5
NORMS = [UN, MABN, PowerNorm]


def make_norm(kind, **options):
    """After two iterations of warm-up; in MABN's window two iterations fit."""
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


def states_equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert a.keys() == b.keys() and not different, different


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
def test_every_iteration_is_the_formulas(options):
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


@pytest.mark.parametrize('options', [dict(kind=MABN, window_size=1), dict(kind=PowerNorm)], ids=str)
def test_gradient_is_exact_without_memory(options):
    norm = make_norm(momentum=1.0, **options)
    for norm.warmup_iters in (1000, 0):
        assert torch.autograd.gradcheck(norm, batch(1, 6).requires_grad_())


@pytest.mark.parametrize('kind', NORMS)
def test_statistics_are_those_without_mean(kind):
    norm = make_norm(kind)
    mean, var = norm.statistics()
    assert torch.equal(mean, torch.zeros(C)) and torch.equal(var, norm.running_var)
    before = var.clone()
    norm.set_statistics(*norm.statistics())
    assert torch.equal(norm.running_var, before)
    x = batch(6)
    norm.set_statistics(x.mean((0, 1)), x.var((0, 1), correction=0))
    torch.testing.assert_close(norm.running_var, x.square().mean((0, 1)), rtol=1e-12, atol=0)


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('kind', NORMS)
def test_recomputation_leaves_the_state(kind, reentrant):
    """And the recomputed forward normalises as the first one did, although the windows have moved on."""

    def run(norm, x):
        return checkpoint(norm, x, use_reentrant=reentrant)

    plain, recomputed = make_norm(kind), make_norm(kind)
    for t in range(1, 14):
        for got, wanted in zip(step(recomputed, t, run), step(plain, t), strict=True):
            assert torch.equal(got, wanted), t
        states_equal(plain, recomputed)
        assert torch.equal(plain.weight.grad, recomputed.weight.grad)
    if kind is UN:
        assert 2 <= plain.num_filtered < 11, 'both fates of the filter must occur'


@pytest.mark.parametrize('kind', NORMS)
def test_reset_starts_everything_but_the_running_variance_again(kind):
    norm = make_norm(kind)
    fresh = copy.deepcopy(norm)
    for t in range(1, 9):
        step(norm, t)
    running_var = norm.running_var.clone()
    norm.reset_state()
    assert torch.equal(norm.running_var, running_var)
    fresh.running_var.copy_(running_var)
    states_equal(norm, fresh)
    for t in range(3):
        for got, wanted in zip(step(norm, t), step(fresh, t), strict=True):
            assert torch.equal(got, wanted), t


@pytest.mark.parametrize('kind', NORMS)
def test_a_state_dict_holds_all_that_goes_on(kind):
    whole = make_norm(kind)
    for t in range(1, 4):
        step(whole, t)
    resumed = kind(C, **({} if kind is PowerNorm else dict(window_size=whole.window_size)), warmup_iters=2).double()
    assert not resumed.statistics_loaded
    resumed.load_state_dict(whole.state_dict())
    assert resumed.statistics_loaded
    for t in range(4, 14):
        for got, wanted in zip(step(resumed, t), step(whole, t), strict=True):
            assert torch.equal(got, wanted), t
    states_equal(resumed, whole)


@pytest.mark.parametrize('kind', NORMS)
def test_one_token_and_maps_that_are_not_contiguous_will_do(kind):
    norms = [make_norm(kind) for _ in range(4)]
    for t in range(1, 8):
        x = batch(t, 2, 3, 4)
        inputs = x, x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), x.flatten(0, 2), x[::2]
        # The last norm gets another batch, only to be told that it does.
        ys = [norm(part) for norm, part in zip(norms, inputs, strict=True)]
        for y in ys[1:3]:
            torch.testing.assert_close(y.view_as(x), ys[0])
        assert not torch.allclose(ys[3], ys[0][::2])
    single = make_norm(kind)
    torch.testing.assert_close(single(torch.full((C,), 3.0).double()), single.weight + single.bias, rtol=1e-5, atol=0)
    assert single(torch.ones(1, 1, C).double()).isfinite().all()


def _parts(t):
    """Tokens and output gradients of two ranks, as many as they like; in one iteration the second has none."""
    sizes = (7 + t % 3, 0 if t == 9 else 1 + t % 5)
    return [
        (batch(t + 100 * rank, size) * (30.0 if t % 6 == 0 else 1.0), batch(1000 + t + rank, size))
        for rank, size in enumerate(sizes)
    ]


def _train(norm, batches, run):
    """Outputs and input gradients of every iteration."""
    results = []
    for x, dy in batches:
        x = x.requires_grad_()
        y = run(norm, x)
        y.backward(dy)
        results.append((y.detach(), x.grad))
    return results


def _train_on_rank(rank, world_size, folder):
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    calls = []
    dist.all_reduce, all_reduce = lambda values: (calls.append(len(values)), all_reduce(values)), dist.all_reduce
    results = {}
    for kind in NORMS:
        for name, run in (
            ('plain', lambda norm, x: norm(x)),
            ('checkpointed', lambda norm, x: checkpoint(norm, x, use_reentrant=False)),
        ):
            norm = make_norm(kind)
            calls.clear()
            outputs = _train(norm, [_parts(t)[rank] for t in range(1, 14)], run)
            results[kind.__name__, name] = dict(
                outputs=outputs, state=norm.state_dict(), calls=list(calls), grad=norm.weight.grad
            )
            norm.eval()(batch(1))
            assert len(calls) == len(results[kind.__name__, name]['calls'])
    torch.save(results, f'{folder}/{rank}.pt')
    dist.destroy_process_group()


def test_two_processes_are_one_with_all_tokens(tmp_path):
    mp.spawn(_train_on_rank, (2, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f'{rank}.pt') for rank in range(2)]
    close = dict(rtol=1e-10, atol=1e-10)
    for kind in NORMS:
        norm = make_norm(kind)
        parts = [_parts(t) for t in range(1, 14)]
        expected = _train(
            norm, [tuple(map(torch.cat, zip(*both, strict=True))) for both in parts], lambda norm, x: norm(x)
        )
        for name in ('plain', 'checkpointed'):
            results = [rank[kind.__name__, name] for rank in ranks]
            for t, both in enumerate(zip(*(r['outputs'] for r in results), expected, strict=True)):
                for got0, got1, wanted in zip(*both, strict=True):
                    torch.testing.assert_close(torch.cat((got0, got1)), wanted, **close, msg=f'{kind} {name} {t}')
            torch.testing.assert_close(results[0]['grad'] + results[1]['grad'], norm.weight.grad, **close)
            for result in results:
                for key, value in norm.state_dict().items():
                    torch.testing.assert_close(result['state'][key], value, **close, msg=f'{kind} {name} {key}')
                # Squares, then gs, each with the count of tokens.
                assert result['calls'] == [C + 1] * 26, result['calls']
        if kind is UN:
            assert norm.num_filtered >= 2


# What each process has pushed into its windows, in order: in one none, because its batches overflowed, in others more
# than fit, so that the latest value stands in any row.
PUSHED = ([3, 5, 11], [], [4, 6, 7, 8, 9], [1])


def _pool_windows_on_rank(rank, world_size, folder, window_size):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=world_size)
    norm = UN(1, window_size=window_size, sync=False)
    for window in (norm.squares, norm.gradients):
        for value in PUSHED[rank]:
            window.push(torch.full((1,), float(value)))
    norm.iteration += len(PUSHED[rank])
    norm.psi += rank
    norm.num_skipped += rank
    running_var = norm.running_var.clone()
    norm.pool_averages()
    assert torch.equal(norm.running_var, running_var) and norm.num_skipped == rank
    buffers = norm.iteration, norm.psi, *norm.squares.buffers(), *norm.gradients.buffers()
    state = [buffer.clone() for buffer in buffers]
    next_mean = []
    for value in (100.0, 200.0):
        norm.squares.push(torch.full((1,), value))
        next_mean.append(norm.squares.mean().item())
    torch.save((state, next_mean), f'{folder}/{rank}.pt')
    dist.destroy_process_group()


@pytest.mark.parametrize('window_size', [2, 4, 7])
def test_windows_of_processes_are_pooled_by_age_and_without_what_was_never_seen(tmp_path, window_size):
    # Forked: a new process would import torch for seconds.
    mp.start_processes(_pool_windows_on_rank, (4, str(tmp_path), window_size), nprocs=4, start_method='fork')
    ranks = [torch.load(tmp_path / f'{rank}.pt') for rank in range(4)]
    by_age = [[values[-1 - age] for values in PUSHED if age < len(values)] for age in range(min(5, window_size))]
    expected = [float(np.mean(values)) for values in by_age]
    for state, next_mean in ranks:
        iteration, psi, values, count, *gradients = state
        assert (iteration, psi, count) == (5, 1.5, 5)
        in_order = [values[(count - 1 - age) % window_size].item() for age in range(len(expected))]
        assert in_order == pytest.approx(expected, rel=1e-6)
        assert torch.equal(values, gradients[0]) and torch.equal(count, gradients[1])
        # Next the oldest go, where the window is full.
        for new, mean in zip((1, 2), next_mean, strict=True):
            window = [*[100.0, 200.0][:new][::-1], *expected][:window_size]
            assert mean == pytest.approx(float(np.mean(window)), rel=1e-6)
    for other, _ in ranks[1:]:
        assert all(map(torch.equal, ranks[0][0], other))


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('kind', NORMS)
def test_many_forwards_may_wait_and_others_without_gradient_come_between(kind, reentrant):
    grads = []
    norms = make_norm(kind), make_norm(kind)
    for norm, run in zip(
        norms, (lambda norm, x: norm(x), lambda norm, x: checkpoint(norm, x, use_reentrant=reentrant)), strict=True
    ):
        xs = [batch(t).requires_grad_() for t in range(1, 13)]
        ys = [run(norm, x) for x in xs]
        with torch.no_grad():
            for t in range(20, 40):
                norm(batch(t))
        sum(y.sin().sum() for y in ys).backward()
        grads.append([x.grad for x in xs])
    assert all(map(torch.equal, *grads))
    states_equal(*norms)


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('kind', NORMS)
def test_a_forward_that_is_no_longer_remembered_is_an_error(kind, reentrant):
    norm = make_norm(kind)
    y = checkpoint(norm, batch(1).requires_grad_(), use_reentrant=reentrant)
    for t in range(norm.MAX_PENDING - 1):
        norm(batch(2 + t))
    y.sum().backward(retain_graph=True)
    norm(batch(1000))
    with pytest.raises(RuntimeError, match=rf'{kind.__name__}\({C}\): .* none of the last 64 .* eval mode'):
        y.sum().backward()


@pytest.mark.parametrize('kind', NORMS)
def test_a_training_forward_inside_a_backward_without_an_earlier_one_is_an_error(kind):
    norm, x = make_norm(kind), torch.zeros(3, C, dtype=torch.double, requires_grad=True)
    x.register_hook(lambda grad: norm(grad))
    with pytest.raises(RuntimeError, match=rf'{kind.__name__}\({C}\): .*inside a backward pass.*eval mode'):
        x.sum().backward()


@pytest.mark.parametrize('kind', NORMS)
def test_a_recomputed_forward_need_not_repeat_its_last_bit(kind):
    """As after layers whose sums have no fixed order."""
    norm, plain = make_norm(kind), make_norm(kind)
    noise = [1.0, 1.0 + 1e-7]
    x, same = batch(3).requires_grad_(), batch(3).requires_grad_()
    checkpoint(lambda x: norm(x * noise.pop(0)), x, use_reentrant=True).sin().sum().backward()
    assert not noise
    plain(same).sin().sum().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('kind', NORMS)
def test_an_overflow_may_be_recomputed_and_zeros_too(kind, reentrant):
    norm = make_norm(kind)
    for value in (float('inf'), float('nan'), 0.0):
        x = batch(1)
        x[0, 0, 1] = value
        x = (x if value else 0 * batch(1)).requires_grad_()
        checkpoint(norm, x, use_reentrant=reentrant).sum().backward()
        assert x.grad.isfinite().all() == (value == 0), value


@pytest.mark.parametrize('kind', NORMS)
def test_compiled_models_train_as_others_do(kind):
    """With a graph break around the norm."""
    plain, compiled = (torch.nn.Sequential(torch.nn.Linear(C, C), make_norm(kind)).double() for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    run = torch.compile(compiled, backend='eager')
    for t in range(1, 9):
        grads = []
        for model in (plain, run):
            x = batch(t).requires_grad_()
            (model(x).sin() * (1 + t)).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-12, atol=1e-12, msg=key)
    assert compiled[1].iteration == 8


@pytest.mark.parametrize('kind', NORMS)
def test_only_evaluation_compiles_into_one_graph(kind):
    # Graphs of other norms count towards the limit of this forward.
    torch._dynamo.reset()
    norm = make_norm(kind)
    run = torch.compile(norm, backend='eager', fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'torch\.compiler\.disable'):
        run(batch(1))
    norm.eval()
    assert torch.equal(run(batch(1)), norm(batch(1)))
