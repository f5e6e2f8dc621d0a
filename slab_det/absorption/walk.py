"""Runs a model unit by unit over many batches: what lies before the current unit is read from memory or files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.utils import apply_to
from torch import Tensor, nn

from slab_det.conversion.convert import ConversionError
from slab_det.conversion.distill import tensors_in
from slab_det.fusion.fuse import containers_of

# Bytes of a CPU's memory for what units return; a GPU gives a quarter of what is free. What is beyond goes to files.
MEMORY = 2**30


class TensorStore:
    """Tensors in tuples by name, on a device up to a number of bytes, beyond it in files.

    Args:
        folder: For the files.
        device: Where tensors come from and go to.
        left: How many bytes are still free; by default ``MEMORY``, or a quarter of the free memory of a GPU.
    """

    def __init__(self, folder: Path, device: torch.device, left: int | None = None) -> None:
        if left is None:
            left = torch.cuda.mem_get_info(device)[0] // 4 if device.type == 'cuda' else MEMORY
        self.folder, self.device, self.left = folder, device, left
        self.values: dict[str, object] = {}

    def put(self, name: str, value: object) -> None:
        """Stores copies: a view would bring all of its memory along."""
        value, size = _map_tensors(value, torch.clone), _count_bytes(value)
        if size <= self.left:
            self.values[name] = value
            self.left -= size
        else:
            torch.save(value, self.folder / f'{name}.pt')

    def get(self, name: str) -> object:
        """Copies: a forward may write into what it reads."""
        if name in self.values:
            return _map_tensors(self.values[name], torch.clone)
        path = self.folder / f'{name}.pt'
        return torch.load(path, map_location=self.device, weights_only=True)  # noqa: TID251 (no file of another's)

    def drop(self, name: str) -> None:
        """Removes what may be there."""
        self.left += _count_bytes(self.values.pop(name, None))
        (self.folder / f'{name}.pt').unlink(missing_ok=True)


class Probe(NamedTuple):
    """A place in a model: the first input of a module, or its (first) output, at the first call in a forward."""

    module: str
    side: str


class _Reached(BaseException):  # noqa: N818 (ends a forward early; nothing may take it for an error)
    pass


class Walk:
    """One model and the stored outputs of its units, which return one after the other, once per forward.

    A unit may lie within a later one. Only outputs that a later unit reads are stored; in the place of others stands
    NaN, which takes no memory.

    Args:
        model: In eval mode.
        forward: Runs the model on an image tensor, as far as the last unit at least.
        units: Names of modules in the order in which they return.
        last_uses: For the image, at index -1, and for each unit the last unit that reads it; see :func:`last_uses`.
        images: Has the image tensor of each batch, (B, 3, H, W), by its index.
        store: Gets the outputs of each unit for each batch.
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
        self.images, self.store, self.name = images, store, name
        # What stands for an output that is not stored.
        self.placeholders: dict[tuple[int, int], object] = {}

    def run(
        self, batch: int, unit: int, probes: Sequence[Probe], live_from: int | None = None, store: bool = False
    ) -> list[Tensor]:
        """Runs ``unit`` on a batch and returns what stands at the probes.

        Args:
            batch: Its index.
            unit: Index of the unit.
            probes: Places before the end of the unit, or where its output arrives.
            live_from: The first unit that is computed, not read; ``unit`` itself by default.
            store: Store the outputs of all computed units that later ones read, and remove what no later one reads.
        """
        live_from = unit if live_from is None else live_from
        found: dict[Probe, Tensor] = {}
        to_store = unit + 1 - live_from if store else 0

        def end_forward() -> None:
            if len(found) == len(probes) and not to_store:
                raise _Reached

        with ExitStack() as stack, torch.no_grad():
            for index, name in enumerate(self.units[:live_from]):
                stack.enter_context(_replaced_forward(self.model.get_submodule(name), self._load(index, batch, unit)))
            for probe in probes:

                def look(value: object, probe: Probe = probe) -> None:
                    found.setdefault(probe, tensors_in(value)[0])
                    end_forward()

                stack.callback(register_probe(self.model.get_submodule(probe.module), probe.side, look).remove)
            if store:
                for index in range(live_from, unit + 1):

                    def keep(module: nn.Module, args: tuple, output: object, index: int = index) -> None:
                        nonlocal to_store
                        self._store(index, batch, output, unit)
                        to_store -= 1
                        end_forward()

                    module = self.model.get_submodule(self.units[index])
                    stack.callback(module.register_forward_hook(keep).remove)
            try:
                self.forward(self._load(-1, batch, unit))
            except _Reached:
                pass
        if missed := ', '.join(probe.module for probe in probes if probe not in found):
            raise ConversionError(f'{missed}: the forward does not call it, though the rules of the model name it')
        if store:
            self._drop(batch, unit)
        return [found[probe] for probe in probes]

    def _drop(self, batch: int, unit: int) -> None:
        """Removes what no unit behind this one reads."""
        for index in range(unit):
            if self.last_uses[index] == unit:
                self.store.drop(f'{self.name}{index}_{batch}')

    def _store(self, unit: int, batch: int, output: object, last: int) -> None:
        self.placeholders[unit, batch] = _map_tensors(output, _filled_like)
        if self.last_uses[unit] > last:
            self.store.put(f'{self.name}{unit}_{batch}', output)

    def _load(self, unit: int, batch: int, reader: int) -> object:
        if self.last_uses[unit] < reader and (unit, batch) in self.placeholders:
            return self.placeholders[unit, batch]
        output = self.images.get(str(batch)) if unit < 0 else self.store.get(f'{self.name}{unit}_{batch}')
        if unit < 0:
            self.placeholders[unit, batch] = _filled_like(output)
        return output


def last_uses(
    model: nn.Module, forward: Callable[[Tensor], object], units: Sequence[str], image: Tensor
) -> dict[int, int]:
    """For the image (-1) and each unit the last unit whose input depends on it while all other units stay the same.

    Units are replaced by ones of the shape that they returned, one of them by NaN: where NaN arrives is what reads it.
    A unit within another is read there.
    """
    within = {
        index: other
        for index, name in enumerate(units)
        for other, unit in enumerate(units)
        if name and unit in ('', *containers_of(name))
    }
    # Whole: a model may take images of one size alone.
    image = image[:1]
    outputs: dict[str, object] = {}
    modules = {name: model.get_submodule(name) for name in units}
    with ExitStack() as stack, torch.no_grad():
        for name, module in modules.items():

            def keep(module: nn.Module, args: tuple, output: object, name: str = name) -> None:
                outputs[name] = _map_tensors(output, _filled_like)

            stack.callback(module.register_forward_hook(keep).remove)
        forward(image)
    uses = {}
    for index in range(-1, len(units)):
        if index in within:
            uses[index] = within[index]
            continue
        readers: list[int] = []
        with ExitStack() as stack, torch.no_grad():
            for other, (name, module) in enumerate(modules.items()):
                given = _map_tensors(outputs[name], partial(_filled_like, value=torch.nan if other == index else 1.0))
                stack.enter_context(_replaced_forward(module, given))

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


def _count_bytes(value: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def _map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> object:
    return apply_to(value, lambda part: isinstance(part, Tensor), change)
