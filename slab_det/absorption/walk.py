"""Runs a model block by block over many batches, and stores what blocks return in memory or in files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slab_det.runtime.errors import ConversionError
from slab_det.runtime.tensors import tensors_in

# Bytes of a CPU's memory for stored tensors. A GPU gives half of its free memory first. The rest goes to files.
MEMORY = 2**30
# Stands for the image among the names of blocks.
IMAGE = '(image)'


class TensorStore:
    """Tensors in tuples and dicts by name: on their device, then in the memory of a CPU, then in files.

    Args:
        folder: For the files.
        device: Where tensors come from and go to.

    Attributes:
        left: How many bytes are still free, by device: of half of the free memory of a GPU, and of ``MEMORY``.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        free = {device: torch.cuda.mem_get_info(device)[0] // 2} if device.type == 'cuda' else {}
        self.left = {**free, torch.device('cpu'): MEMORY}
        self.folder, self.device = folder, device
        # The device and the value, or None and the file.
        self.values: dict[str, tuple[torch.device | None, object]] = {}

    def put(self, name: str, value: object) -> None:
        """Stores copies: a view would bring all of its memory along."""
        self.drop(name)
        size = sum(tensor.nbytes for tensor in tensors_in(value))
        for device, left in self.left.items():
            if size <= left:
                self.values[name] = device, _copy_to(value, device)
                self.left[device] -= size
                return
        self.values[name] = None, self.folder / f'{name}.pt'
        torch.save(_copy_to(value, self.device), self.values[name][1])

    def get(self, name: str) -> object:
        """Copies: a forward may write into what it reads."""
        device, value = self.values[name]
        if device:
            return _copy_to(value, self.device)
        return torch.load(value, map_location=self.device, weights_only=True)  # noqa: TID251 (our own file)

    def drop(self, name: str) -> None:
        """Removes a value if it is there."""
        device, value = self.values.pop(name, (None, None))
        if device:
            self.left[device] += sum(tensor.nbytes for tensor in tensors_in(value))
        elif value:
            value.unlink()


class Probe(NamedTuple):
    """A place in a model: the first input of a module, or its (first) output, at the first call in a forward."""

    module: str
    side: str


class _Stop(BaseException):  # noqa: N818 (ends a forward early; nothing may take it for an error)
    pass


class Walk:
    """Runs one model over many batches. Modules that are finished return stored outputs instead of being called.

    Args:
        model: In eval mode.
        forward: Runs the model on an image tensor, as far as the last block at least.
        reads: Names of the finished modules, and ``IMAGE``, that each block needs, by the names of the blocks in the
            order of their calls; see :func:`find_reads`.
        store: Has the image tensor of each batch, (B, 3, H, W), by its index, and gets outputs of modules.
        name: Tells walks with the same store apart.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Tensor], object],
        reads: Mapping[str, set[str]],
        store: TensorStore,
        name: str = '',
    ) -> None:
        self.model, self.forward, self.reads, self.store, self.name = model, forward, reads, store, name
        # For each batch, outputs of NaN by the names of finished modules: they stand for outputs that are not read.
        self.finished: dict[int, dict[str, object]] = defaultdict(dict)

    def run(self, batch: int, block: str, probes: Sequence[Probe] = (), finish: str = '') -> list[Tensor]:
        """Runs the model as far as the probes and returns the tensors there.

        Args:
            batch: The index of the batch.
            block: The block that has the probes. The blocks before it are finished.
            probes: Places in the block.
            finish: The block or a module in it, which is finished with its output of this run.
        """
        found: dict[Probe, object] = {}
        wanted = {*probes, Probe(finish, 'output')} if finish else {*probes}
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
                stack.enter_context(_returning(self.model.get_submodule(name), output))
            for probe in wanted:
                module = self.model.get_submodule(probe.module)
                stack.callback(register_probe(module, probe.side, partial(see, probe=probe)).remove)
            with suppress(_Stop):
                self.forward(image)
        if missed := ', '.join(probe.module for probe in wanted if probe not in found):
            raise ConversionError(f'{missed}: the forward does not call it, though the rules of the model name it')
        if finish:
            self._finish(finish, batch, found[Probe(finish, 'output')], block)
        return [tensors_in(found[probe])[0] for probe in probes]

    def _finish(self, name: str, batch: int, output: object, block: str) -> None:
        blocks = [*self.reads]
        read_later = set().union(*map(self.reads.get, blocks[blocks.index(block) + (name == block) :]))
        self.finished[batch][name] = tree_map_only(Tensor, _filled_like, output)
        if name in read_later:
            self.store.put(self._key(name, batch), output)
        for other in self.finished[batch].keys() - read_later:
            self.store.drop(self._key(other, batch))

    def _key(self, name: str, batch: int) -> str:
        return f'{self.name}{name}_{batch}'


def find_reads(
    model: nn.Module, forward: Callable[[Tensor], object], blocks: Iterable[str], image: Tensor
) -> dict[str, set[str]]:
    """Names of the earlier blocks, and ``IMAGE``, whose outputs the input of each block is computed from.

    Each block returns leaves of autograd's graph. The graph then leads from the input of a later block to the outputs
    that it depends on, as far as other blocks do not stand between.
    """
    reads: dict[str, set[str]] = {}
    leaves = [(IMAGE, image[:1].clone().requires_grad_())]

    def enter(module: nn.Module, args: tuple, kwargs: dict, name: str) -> None:
        sums = [tensor.sum() for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        sources, tensors = zip(*leaves, strict=True)
        gradients = torch.autograd.grad(sums, tensors, retain_graph=True, allow_unused=True) if sums else ()
        reads[name] = {source for source, gradient in zip(sources, gradients, strict=False) if gradient is not None}
        # The graph of a whole block would take the memory of a training step.
        torch.set_grad_enabled(False)

    def leave(output: object, name: str) -> object:
        def cut(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaf = _filled_like(tensor, 1.0).requires_grad_()
            leaves.append((name, leaf))
            # Autograd forbids writing into a leaf.
            return leaf.clone()

        torch.set_grad_enabled(True)
        return tree_map_only(Tensor, cut, output)

    with ExitStack() as stack, torch.enable_grad():
        for name in blocks:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(partial(enter, name=name), with_kwargs=True).remove)
            stack.callback(register_probe(module, 'output', partial(leave, name=name)).remove)
        forward(leaves[0][1].clone())
    return reads


def register_probe(module: nn.Module, side: str, look: Callable[[object], object]) -> torch.utils.hooks.RemovableHandle:
    """Calls ``look`` with the arguments or the output of every call of a module."""
    if side == 'input':
        return module.register_forward_pre_hook(lambda module, args: look(args))
    return module.register_forward_hook(lambda module, args, output: look(output))


@contextmanager
def _returning(module: nn.Module, output: object) -> Iterator[None]:
    # A forward that somebody gave to this one module comes back.
    own = {key: value for key, value in vars(module).items() if key == 'forward'}
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


def _filled_like(tensor: Tensor, value: float = torch.nan) -> Tensor:
    """A tensor of one value, which takes no memory; a tensor of integers is left as it is."""
    return tensor.new_full((), value).expand(tensor.shape) if tensor.is_floating_point() else tensor


def _copy_to(value: object, device: torch.device) -> object:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)
