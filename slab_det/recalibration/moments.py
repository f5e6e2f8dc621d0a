"""Collects means and variances of the inputs of modules, over batches and processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
from mmengine.dist import all_gather_object, is_main_process
from torch import Tensor, nn

from slab_det.common.batches import prepare_inputs
from slab_det.common.distributed import raise_on_all_ranks
from slab_det.common.errors import SlabDetError
from slab_det.common.modules import evaluating
from slab_det.common.progress import Progress


class RecalibrationError(SlabDetError):
    """Statistics that cannot be estimated: no data, or values that are not finite."""


class Moments:
    """Count of tokens, mean and scatter ``sum (x - mean)^2`` of each channel, (C,), in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.scatter: Tensor | float = 0.0

    def add(self, values: Tensor) -> None:
        """Adds tokens, (..., C)."""
        # One copy, changed in place: on large maps another array costs more than the arithmetic.
        tokens = values.detach().flatten(0, -2).to(torch.float64, copy=True)
        part = Moments()
        part.count, part.mean = len(tokens), tokens.mean(0)
        part.scatter = tokens.sub_(part.mean).square_().sum(0)
        self.merge(part)

    def merge(self, other: Moments) -> None:
        """Adds the tokens of ``other`` by the formula of Chan, Golub and LeVeque (1979)."""
        if other.count == 0:
            return
        count = self.count + other.count
        distance = other.mean - self.mean
        self.mean = self.mean + distance * (other.count / count)
        self.scatter = self.scatter + other.scatter + distance.square() * (self.count * other.count / count)
        self.count = count

    @property
    def var(self) -> Tensor:
        """Population variances, (C,)."""
        return self.scatter / self.count


def collect_moments(
    model: nn.Module, modules: Mapping[str, nn.Module], batches: Iterable, title: str | None
) -> tuple[dict[str, Moments], int]:
    """Runs ``model`` in eval mode and collects moments of the inputs of modules, over batches and processes.

    Args:
        model: A detector or a backbone.
        modules: Modules of ``model`` with inputs (..., C), by their names.
        batches: Batches of this process; see :func:`slab_det.recalibrate`.
        title: Title of the progress bar; None for no bar.

    Returns:
        Moments by name, in the order in which the modules were first called, and the number of batches.

    Raises:
        RecalibrationError: If there is no batch, or a module was never reached.
        RankError: On all other ranks, if one rank fails.
    """
    prepare = prepare_inputs(model, batches)
    # Heads run only where they have norms too.
    has_norms_in_heads = not all(name.startswith(('backbone.', 'neck.')) for name in modules)
    moments: dict[str, Moments] = {}
    num_batches_here = 0
    with raise_on_all_ranks(), torch.no_grad(), evaluating(model), ExitStack() as stack:
        for name, module in modules.items():

            def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                moments.setdefault(name, Moments()).add(args[0])

            stack.callback(module.register_forward_hook(add).remove)
        shown = title and is_main_process()
        for batch in stack.enter_context(Progress(batches, title, disable=not shown)):
            inputs, samples = prepare(batch)
            if has_norms_in_heads and not isinstance(batch, Tensor):
                model(inputs, samples, mode='predict')
            else:
                getattr(model, 'extract_feat', model)(inputs)
            num_batches_here += 1
    for part in moments.values():
        if part.count:
            # Another process could not unpickle a tensor of this one's GPU.
            part.mean, part.scatter = part.mean.cpu(), part.scatter.cpu()
    pooled: dict[str, Moments] = {}
    num_batches = 0
    # Merged in the order of ranks, so that results are equal in all processes to the last bit.
    for count, moments_of_rank in all_gather_object((num_batches_here, moments)):
        num_batches += count
        for name, part in moments_of_rank.items():
            pooled.setdefault(name, Moments()).merge(part)
    if num_batches == 0:
        raise RecalibrationError('there was no batch of images; check the dataset and its filter_cfg')
    unseen = [name for name in modules if name not in pooled or pooled[name].count == 0]
    if unseen:
        raise RecalibrationError(f'{", ".join(unseen)}: no batch reached these norms')
    return pooled, num_batches
