"""What a gradient scaler skips must not stay in the norms."""

import copy

import pytest
import torch
from conftest import differing
from torch import nn
from torch.utils.checkpoint import checkpoint

import slab_det
from slab_det.norms import MABN, UN, PowerNorm, PRepBN, RepBN, TokenBN

C = 4
QUADRATIC = {
    'UN': lambda: UN(C, window_size=2, warmup_iters=1),
    'MABN': lambda: MABN(C, window_size=2, warmup_iters=1),
    'PowerNorm': lambda: PowerNorm(C, warmup_iters=1),
}


def progressive(gamma):
    norm = PRepBN(C)
    norm.gamma = gamma
    return norm


NORMS = {
    'TokenBN': lambda: TokenBN(C),
    'RepBN': lambda: RepBN(C),
    **{f'PRepBN at {gamma}': lambda gamma=gamma: progressive(gamma) for gamma in (0.0, 0.5, 1.0)},
    **QUADRATIC,
}
RUNS = {
    'plain': lambda module, x: module(x),
    'checkpointed': lambda module, x: checkpoint(module, x, use_reentrant=False),
    'reentrant': lambda module, x: checkpoint(module, x, use_reentrant=True),
}
# The last is finite in bfloat16, and so no bad batch there.
BAD = [
    (torch.bfloat16, float('nan')),
    (torch.bfloat16, float('inf')),
    (torch.float16, float('nan')),
    (torch.float16, float('inf')),
    (torch.float16, 1e6),
]


class Training:
    """Linear, norm, linear under autocast and a CPU gradient scaler whose scale stays where it is."""

    def __init__(self, norm, dtype, run='plain'):
        torch.manual_seed(0)
        self.norm = norm
        self.model = nn.Sequential(nn.Linear(C, C), norm, nn.Linear(C, 1))
        self.dtype, self.run = dtype, RUNS[run]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler('cpu', init_scale=64.0)

    def step(self, x):
        """One iteration; whether the scaler let the optimizer step."""
        before = copy.deepcopy(self.model[0].weight)
        self.optimizer.zero_grad()
        # Reentrant checkpointing asks for an input with gradient.
        x = x.clone().requires_grad_()
        with torch.autocast('cpu', self.dtype):
            loss = self.run(self.model, x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update(64.0)
        return not torch.equal(before, self.model[0].weight)


def batch(t, bad=None):
    x = torch.randn(2, 6, C, generator=torch.Generator().manual_seed(t))
    if bad is not None:
        # One token; the linear layer spreads it over all channels.
        x[0, 2, 1] = bad
    return x


@pytest.mark.parametrize('run', RUNS)
@pytest.mark.parametrize('dtype, bad', BAD, ids=str)
@pytest.mark.parametrize('kind', NORMS)
def test_a_skipped_batch_leaves_no_trace(kind, dtype, bad, run):
    """Neither in averages, windows and counters nor in the training that follows."""
    training, untroubled = (Training(NORMS[kind](), dtype, run) for _ in range(2))
    for t in range(7):
        if t in (0, 2, 4):
            before = copy.deepcopy(training.model.state_dict())
            assert not training.step(batch(t, bad)), 'the scaler skips it'
            assert not differing(before, training.model)
            assert training.norm.num_skipped == 1 + t // 2
        else:
            assert training.step(batch(t)) and untroubled.step(batch(t))
    assert not differing(training.model, untroubled.model)
    assert (training.norm.num_skipped, untroubled.norm.num_skipped) == (3, 0)
    assert all(value.isfinite().all() for value in training.model.state_dict().values())


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
@pytest.mark.parametrize('kind', NORMS)
def test_one_bad_channel_keeps_the_batch_out_of_all(kind, bad):
    norm = NORMS[kind]()
    norm(batch(0)).sum().backward()
    before = copy.deepcopy(norm.state_dict())
    norm(batch(1, bad)).sum().backward()
    assert not differing(before, norm)
    norm(batch(2)).sum().backward()
    assert differing(before, norm)


@pytest.mark.parametrize('kind', QUADRATIC)
def test_a_gradient_that_overflows_leaves_no_trace_in_the_backward_averages(kind):
    """The forward was sound and counts; only the scale was too high."""
    norm, untroubled = QUADRATIC[kind](), QUADRATIC[kind]()
    for t in range(6):
        dy = batch(t + 10)
        if t in (0, 3):
            dy[0, 2, 1] = float('inf')
        norm(batch(t)).backward(dy)
        y = untroubled(batch(t))
        if t not in (0, 3):
            y.backward(dy)
    assert not differing(norm, untroubled)
    assert norm.iteration == 6


def test_a_detector_in_half_precision_is_near_its_float32_self(small_detector):
    """Unfused and fused; 0.05 is 6 units of bfloat16's last place at full depth."""
    image = torch.randn(1, 3, 96, 128)
    for attention in ('softmax', 'sla'):
        windows = (10, 6, 7, 7) if attention == 'sla' else None
        model = small_detector(attention=attention, window_sizes=windows).backbone
        for variant in (model, slab_det.fuse(model)):
            with torch.no_grad():
                wanted = variant(image)
                for dtype in (torch.bfloat16, torch.float16):
                    with torch.autocast('cpu', dtype):
                        got = variant(image)
                    for a, b in zip(got, wanted, strict=True):
                        assert (a.float() - b).norm() < (0.05 if dtype is torch.bfloat16 else 0.01) * b.norm()
