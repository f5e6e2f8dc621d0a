"""Batches that a gradient scaler skips, and detectors in half precision."""

import copy

import pytest
import torch
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


@pytest.mark.parametrize('dtype, bad', BAD, ids=str)
@pytest.mark.parametrize('kind', NORMS)
def test_training_goes_on_after_skipped_batches(kind, dtype, bad):
    """The same with activation checkpointing. BatchNorm's statistics are NaN until recalibration, as PyTorch's are."""
    trainings = {run: Training(NORMS[kind](), dtype, run) for run in RUNS}
    untroubled = Training(NORMS[kind](), dtype)
    for t in range(7):
        for training in trainings.values():
            assert training.step(batch(t, bad if t in (0, 2, 4) else None)) == (t not in (0, 2, 4))
        if t not in (0, 2, 4):
            untroubled.step(batch(t))
    plain = trainings['plain'].model.state_dict()
    for run, training in trainings.items():
        for key, value in training.model.state_dict().items():
            assert torch.equal(value.nan_to_num(), plain[key].nan_to_num()), f'{run}: {key}'
    for key, value in plain.items():
        if kind in QUADRATIC:
            assert value.isfinite().all(), key
        elif 'running' not in key:
            assert torch.equal(value, untroubled.model.state_dict()[key]), key


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
@pytest.mark.parametrize('kind', QUADRATIC)
def test_a_channel_that_is_not_finite_takes_the_average_in_its_place(kind, bad):
    """In the forward and in the backward pass; the other channels take the batch."""
    norm, untroubled = QUADRATIC[kind](), QUADRATIC[kind]()
    for t in range(6):
        x, dy = batch(t), batch(t + 10)
        untroubled(x).backward(dy)
        if t == 2:
            before = norm.running_var.clone()
            x = batch(t, bad)
        elif t == 3:
            dy[0, 2, 1] = bad
        norm(x).backward(dy)
        if t == 2:
            # UN averages the geometric mean of a window, which holds the average now.
            assert kind == 'UN' or torch.equal(norm.running_var[1], before[1])
    others = [0, 2, 3]
    for key, value in norm.named_buffers():
        assert value.isfinite().all(), key
        wanted = untroubled.get_buffer(key)
        assert torch.equal(value[..., others], wanted[..., others]) if value.ndim else value == wanted, key


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
