"""Runs a model unit by unit over many batches: what lies before the current unit is read from memory or files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.utils import apply_to
from torch import Tensor, nn

from slab_det.fusion.fuse import containers_of
from slab_det.runtime.errors import ConversionError
from slab_det.runtime.tensors import tensors_in

# Bytes of a CPU's memory for what is stored. A GPU gives half of what is free first; what is beyond both goes to files.
MEMORY = 2**30


class TensorStore:
    """Tensors in tuples and dicts by name: on their device, then in the memory of a CPU, then in files.

    Args:
        folder: For the files.
        device: Where tensors come from and go to.
        left: How many bytes are still free, by device; by default half of the free memory of a GPU, and ``MEMORY``.
    """

    def __init__(self, folder: Path, device: torch.device, left: Mapping[torch.device, int] | None = None) -> None:
        free = {device: torch.cuda.mem_get_info(device)[0] // 2} if device.type == 'cuda' else {}
        self.left = dict(left or {**free, torch.device('cpu'): MEMORY})
        self.folder, self.device = folder, device
        # Where each is, and what; or None and its file.
        self.values: dict[str, tuple[torch.device | None, object]] = {}

    def put(self, name: str, value: object) -> None:
        """Stores copies: a view would bring all of its memory along."""
        size = _count_bytes(value)
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
        return torch.load(value, map_location=self.device, weights_only=True)  # noqa: TID251 (no file of another's)

    def drop(self, name: str) -> None:
        """Removes what may be there."""
        device, value = self.values.pop(name, (None, None))
        if device:
            self.left[device] += _count_bytes(value)
        elif value:
            value.unlink()


class Probe(NamedTuple):
    """A place in a model: the first input of a module, or its (first) output, at the first call in a forward."""

    module: str
    side: str


class _Reached(BaseException):  # noqa: N818 (ends a forward early; nothing may take it for an error)
    pass


class Walk:
    """One model, unit by unit: what the current one is called with is stored, and so are outputs that later ones read.

    A unit may lie within a later one, its root, which is then called in its place. In the place of outputs that nothing
    reads stands NaN, which takes no memory.

    Args:
        model: In eval mode.
        forward: Runs the model on an image tensor, as far as the last unit at least.
        units: Names of modules in the order in which they return, once per forward.
        last_uses: See :func:`last_uses`.
        images: Has the image tensor of each batch, (B, 3, H, W), by its index.
        store: Gets what is stored for each batch.
        name: Tells walks with the same store apart.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Tensor], object],
        units: Sequence[str],
        last_uses: Mapping[int, int],
        images: TensorStore,
        store: TensorStore,
        name: str = '',
    ) -> None:
        self.model, self.forward, self.units, self.last_uses = model, forward, units, last_uses
        self.images, self.store, self.name, self.roots = images, store, name, find_roots(units)
        # What stands for an output, or for the image at -1.
        self.placeholders: dict[tuple[int, int], object] = {}

    def run(self, batch: int, unit: int, probes: Sequence[Probe], store: bool = False) -> list[Tensor]:
        """Runs ``unit`` on a batch and returns what stands at the probes.

        Args:
            batch: Its index.
            unit: Index of the unit.
            probes: Places in its root, before the end of the unit or where its output arrives.
            store: Store its output, or what the root behind it is called with.
        """
        root, found, outputs = self.roots[unit], {}, []
        args, kwargs = self.store.get(self._key('call', batch))

        def note(value: object, probe: Probe) -> None:
            found.setdefault(probe, tensors_in(value)[0])
            end_forward()

        def keep(output: object) -> None:
            outputs.append(output)
            end_forward()

        def end_forward() -> None:
            if len(found) == len(probes) and len(outputs) == store:
                raise _Reached

        with ExitStack() as stack, torch.no_grad():
            for index in range(unit):
                if self.roots[index] == root and (index, batch) in self.placeholders:
                    stack.enter_context(_replaced_forward(self._module(index), self.store.get(self._key(index, batch))))
            for probe in probes:
                module = self.model.get_submodule(probe.module)
                stack.callback(register_probe(module, probe.side, partial(note, probe=probe)).remove)
            if store:
                stack.callback(register_probe(self._module(unit), 'output', keep).remove)
            with suppress(_Reached):
                self._module(root)(*args, **kwargs)
        if missed := ', '.join(probe.module for probe in probes if probe not in found):
            raise ConversionError(f'{missed}: the forward does not call it, though the rules of the model name it')
        if store and unit == root:
            self.advance(batch, unit + 1, {unit: outputs.pop()})
        elif store:
            self._store(unit, batch, outputs.pop())
        return [found[probe] for probe in probes]

    def advance(self, batch: int, unit: int, outputs: Mapping[int, object] | None = None) -> None:
        """Runs the model up to the call of the root of ``unit`` and stores what is read from there on.

        Args:
            batch: The index of the batch.
            unit: Index of the unit.
            outputs: What the unit before it returned; None runs all units before it.
        """
        root = self.roots[unit]
        before = [index for index in range(root) if self.roots[index] == index]

        def keep(output: object, index: int) -> None:
            self._store(index, batch, output, self.last_uses[index] > root)

        def arrive(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.store.drop(self._key('call', batch))
            self.store.put(self._key('call', batch), (args, kwargs))
            raise _Reached

        with ExitStack() as stack, torch.no_grad():
            for index in before:
                if outputs is None:
                    stack.callback(register_probe(self._module(index), 'output', partial(keep, index=index)).remove)
                else:
                    output = outputs[index] if index in outputs else self._load(index, batch, root)
                    stack.enter_context(_replaced_forward(self._module(index), output))
            # Hooks that others registered run when the root itself is.
            handle = self._module(root).register_forward_pre_hook(arrive, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            try:
                self.forward(self._load(-1, batch, root))
            except _Reached:
                pass
            else:
                raise ConversionError(f'{self.units[root]}: the forward does not come to it with batch {batch}')
        for index, output in (outputs or {}).items():
            keep(output, index)
        for index in range(root):
            if self.roots[index] != index or self.last_uses[index] <= root:
                self.store.drop(self._key(index, batch))

    def _module(self, unit: int) -> nn.Module:
        return self.model.get_submodule(self.units[unit])

    def _key(self, what: int | str, batch: int) -> str:
        return f'{self.name}{what}_{batch}'

    def _store(self, unit: int, batch: int, output: object, read: bool = True) -> None:
        self.placeholders[unit, batch] = _map_tensors(output, _filled_like)
        if read:
            self.store.put(self._key(unit, batch), output)

    def _load(self, unit: int, batch: int, reader: int) -> object:
        if self.last_uses[unit] < reader and (unit, batch) in self.placeholders:
            return self.placeholders[unit, batch]
        if unit >= 0:
            return self.store.get(self._key(unit, batch))
        image = self.images.get(str(batch))
        self.placeholders[unit, batch] = _filled_like(image)
        return image


def find_roots(units: Sequence[str]) -> list[int]:
    """For each unit the index of the outermost unit that it lies in, or its own."""
    return [
        max((root for root, other in enumerate(units) if name and other in ('', *containers_of(name))), default=index)
        for index, name in enumerate(units)
    ]


def last_uses(
    model: nn.Module, forward: Callable[[Tensor], object], units: Sequence[str], image: Tensor
) -> dict[int, int]:
    """For the image (-1) and each root the last root whose input depends on it while all other roots stay the same.

    Roots are replaced by ones of the shape that they returned, one of them by NaN: where NaN arrives is what reads it.
    """
    # Whole: a model may take images of one size alone.
    image = image[:1]
    outputs: dict[int, object] = {}
    modules = {index: model.get_submodule(units[index]) for index in sorted({*find_roots(units)})}
    with ExitStack() as stack, torch.no_grad():
        for index, module in modules.items():

            def keep(output: object, index: int = index) -> None:
                outputs[index] = _map_tensors(output, _filled_like)

            stack.callback(register_probe(module, 'output', keep).remove)
        forward(image)
    uses = {}
    for index in (-1, *modules):
        readers: list[int] = []
        with ExitStack() as stack, torch.no_grad():
            for other, module in modules.items():
                given = partial(_filled_like, value=torch.nan if other == index else 1.0)
                stack.enter_context(_replaced_forward(module, _map_tensors(outputs[other], given)))

                def look(
                    module: nn.Module, args: tuple, kwargs: dict, other: int = other, readers: list = readers
                ) -> None:
                    if any(tensor.isnan().any() for tensor in tensors_in((args, kwargs))):
                        readers.append(other)

                stack.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
            forward(_filled_like(image, torch.nan if index < 0 else 1.0))
        uses[index] = max(readers, default=index)
    return uses


def register_probe(module: nn.Module, side: str, look: Callable[[object], None]) -> torch.utils.hooks.RemovableHandle:
    """Calls ``look`` with the arguments or the output of every call of a module."""
    if side == 'input':
        return module.register_forward_pre_hook(lambda module, args: look(args))
    return module.register_forward_hook(lambda module, args, output: look(output))


@contextmanager
def _replaced_forward(module: nn.Module, output: object) -> Iterator[None]:
    # A forward that somebody gave to this one module comes back.
    own = {key: value for key, value in vars(module).items() if key == 'forward'}
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        vars(module).update(own)


def _filled_like(tensor: Tensor, value: float = torch.nan) -> Tensor:
    """A tensor of one value, which takes no memory; one of integers is left as it is."""
    return tensor.new_full((), value).expand(tensor.shape) if tensor.is_floating_point() else tensor


def _copy_to(value: object, device: torch.device) -> object:
    return _map_tensors(value, lambda tensor: tensor.to(device, copy=True))


def _count_bytes(value: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def _map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> object:
    return apply_to(value, lambda part: isinstance(part, Tensor), change)
