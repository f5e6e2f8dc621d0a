"""What a norm asks about the run around it: is this forward a recomputation, and what do other processes see."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mmengine.dist import get_world_size
from torch import Tensor
from torch.autograd.function import FunctionCtx


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing recomputes its activations.

    True under reentrant and non-reentrant checkpointing. A compiled forward counts as no recomputation.
    """
    if torch.compiler.is_compiling():
        return False
    # Private, so it may go: then a recomputed forward looks like any other. -1 means "no backward in this thread".
    graph_task_id = getattr(torch._C, '_current_graph_task_id', None)
    return graph_task_id is not None and graph_task_id() != -1


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of ``values`` over all processes, differentiable; ``values`` itself stays as it is."""
    return _SumOverProcesses.apply(values) if get_world_size() > 1 else values


class _SumOverProcesses(torch.autograd.Function):
    """Every process reads the sum, so the gradient of a summand is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return _SumOverProcesses.apply(grad)
