"""Telling recomputed forwards from first ones."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slab_det.runtime import is_recomputing


class Probe(nn.Module):
    """Doubles its input and notes what is_recomputing says."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(is_recomputing())
        # Something that autograd saves: without it, nothing would be recomputed.
        return (x * 2).sin()


@pytest.mark.parametrize('use_reentrant', [True, False])
def test_only_the_forward_inside_backward_is_a_recomputation(use_reentrant):
    probe = Probe()
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        checkpoint(probe, x, use_reentrant=use_reentrant).sum().backward()
        assert x.grad is not None
    assert probe.seen == [False, True] * 2


@pytest.mark.parametrize('use_reentrant', [True, False])
def test_nested_checkpoints(use_reentrant):
    inner, outer = Probe(), Probe()

    def block(x):
        return outer(checkpoint(inner, x, use_reentrant=use_reentrant))

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert outer.seen == [False, True]
    assert inner.seen[0] is False and all(inner.seen[1:]) and len(inner.seen) > 1


def test_plain_training_and_evaluation_recompute_nothing():
    probe = Probe()
    probe(torch.ones(3, requires_grad=True)).sum().backward()
    with torch.no_grad():
        probe(torch.ones(3))
    assert probe.seen == [False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU, whose backward runs in a thread of its own')
@pytest.mark.parametrize('use_reentrant', [True, False])
def test_recomputation_on_a_gpu(use_reentrant):
    probe = Probe()
    checkpoint(probe, torch.ones(3, device='cuda', requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert probe.seen == [False, True]


def test_compiled_forward_has_no_graph_break():
    def double_unless_recomputing(x):
        return x if is_recomputing() else x * 2

    compiled = torch.compile(double_unless_recomputing, backend='eager', fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_exported_forward():
    class Model(nn.Module):
        def forward(self, x):
            return x if is_recomputing() else x * 2

    exported = torch.export.export(Model(), (torch.ones(3),)).module()
    assert torch.equal(exported(torch.ones(3)), torch.full((3,), 2.0))


def test_torch_without_the_private_function(monkeypatch):
    monkeypatch.delattr(torch._C, '_current_graph_task_id')
    assert is_recomputing() is False
