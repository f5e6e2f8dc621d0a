"""Runs a model block by block over many batches, and keeps the outputs of finished blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor, nn

from slab_det.absorption.probes import Probe, register_probe, run_as_far_as
from slab_det.absorption.store import TensorStore
from slab_det.common.errors import ConversionError
from slab_det.common.tensors import map_tensors, tensors_in

# Stands for the image among the names of blocks.
IMAGE = '(image)'


class _Stop(BaseException):  # noqa: N818 (ends a forward early; nothing may take it for an error)
    pass


class Walk:
    """Runs one model over many batches, and replaces each finished block by its stored output.

    Args:
        model: In eval mode.
        reads: For each block, in the order of the calls, the names of the blocks, and ``IMAGE``, whose outputs it
            needs; see :func:`find_reads`.
        store: Holds the image tensor of each batch, (B, 3, H, W), by its index, and takes the outputs of blocks.
        name: Prefix of this walk's names in the store, which two walks may share.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Mapping[str, set[str]],
        store: TensorStore,
        name: str = '',
    ) -> None:
        self.model, self.reads, self.store, self.name = model, reads, store, name
        # By batch and name of a finished block: its output filled with NaN, for blocks that need only its shape.
        self.finished: dict[int, dict[str, object]] = defaultdict(dict)

    def finish(self, batch: int, block: str) -> None:
        """Runs a block, unless it is finished."""
        if block not in self.finished[batch]:
            self.run(batch, block, finish=True)

    def run(self, batch: int, block: str, probes: Sequence[Probe] = (), finish: bool = False) -> list[Tensor]:
        """Runs the model until all probes are reached, and returns their tensors.

        Args:
            batch: The index of the batch.
            block: The block to run. The blocks before it are finished.
            probes: Points in the block.
            finish: Whether the output of the block in this run stands for it from then on.
        """
        found: dict[Probe, object] = {}
        end = Probe(block, 'output')
        wanted = {*probes, *([end] if finish else [])}
        finished = self.finished[batch]
        image = finished.pop(IMAGE, None)
        given = {
            name: self.store.get(self._key(name, batch)) if name in self.reads[block] else output
            for name, output in finished.items()
        }
        if image is None or IMAGE in self.reads[block]:
            image = self.store.get(str(batch))
        finished[IMAGE] = _filled_like(image)

        def see(value: object, probe: Probe) -> None:
            found.setdefault(probe, value)
            if len(found) == len(wanted):
                raise _Stop

        with ExitStack() as stack, torch.no_grad():
            for name, output in given.items():
                stack.enter_context(_replaced_by_output(self.model.get_submodule(name), output))
            for probe in wanted:
                module = self.model.get_submodule(probe.module)
                stack.callback(register_probe(module, probe.side, partial(see, probe=probe)).remove)
            with suppress(_Stop):
                run_as_far_as(self.model, image, (probe.module for probe in wanted))
        if missed := ', '.join(probe.module for probe in wanted if probe not in found):
            raise ConversionError(f'{missed}: the forward does not call it, though the rules of the model name it')
        if finish:
            self._keep(batch, block, found[end])
        return [tensors_in(found[probe])[0] for probe in probes]

    def _keep(self, batch: int, block: str, output: object) -> None:
        blocks = [*self.reads]
        read_later = set().union(*map(self.reads.get, blocks[blocks.index(block) + 1 :]))
        self.finished[batch][block] = map_tensors(_filled_like, output)
        if block in read_later:
            self.store.put(self._key(block, batch), output)
        for other in self.finished[batch].keys() - read_later:
            self.store.drop(self._key(other, batch))

    def _key(self, name: str, batch: int) -> str:
        return f'{self.name}{name}_{batch}'


def find_reads(model: nn.Module, blocks: Collection[str], image: Tensor) -> dict[str, set[str]]:
    """Finds for each block the earlier blocks, and ``IMAGE``, whose outputs its input is computed from.

    Every block output is replaced by a leaf of autograd's graph. The input of a later block then has a gradient with
    respect to a leaf only if it is computed from this output directly, and not from the output of a block in between.
    """
    reads: dict[str, set[str]] = {}
    leaves = [(IMAGE, image[:1].clone().requires_grad_())]

    def enter(module: nn.Module, args: tuple, kwargs: dict, name: str) -> None:
        sums = [tensor.sum() for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        sources, tensors = zip(*leaves, strict=True)
        gradients = torch.autograd.grad(sums, tensors, retain_graph=True, allow_unused=True) if sums else ()
        reads[name] = {source for source, gradient in zip(sources, gradients, strict=False) if gradient is not None}
        # Inside a block no graph is needed, and it would take the memory of a training step.
        torch.set_grad_enabled(False)

    def leave(output: object, name: str) -> object:
        def cut(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaf = _filled_like(tensor, 1.0).requires_grad_()
            leaves.append((name, leaf))
            # Autograd forbids in-place writes to a leaf.
            return leaf.clone()

        torch.set_grad_enabled(True)
        return map_tensors(cut, output)

    with ExitStack() as stack, torch.enable_grad():
        for name in blocks:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(partial(enter, name=name), with_kwargs=True).remove)
            stack.callback(register_probe(module, 'output', partial(leave, name=name)).remove)
        run_as_far_as(model, leaves[0][1].clone(), blocks)
    return reads


@contextmanager
def _replaced_by_output(module: nn.Module, output: object) -> Iterator[None]:
    # Restores a forward that was set on this module object.
    own = {key: value for key, value in vars(module).items() if key == 'forward'}
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


def _filled_like(tensor: Tensor, value: float = torch.nan) -> Tensor:
    """A tensor of the same shape with one value, expanded to take no memory; an integer tensor is left as it is."""
    return tensor.new_full((), value).expand(tensor.shape) if tensor.is_floating_point() else tensor
