"""TensorStore: keeps images and the outputs of blocks in memory, or in files."""

from __future__ import annotations

from pathlib import Path

import torch

from slab_det.common.memory import available_memory
from slab_det.common.tensors import map_tensors, tensors_in

# Bytes of CPU memory for stored tensors where the system does not tell how much is free.
MEMORY = 2**30


class TensorStore:
    """Stores values that hold tensors by name: in half of a GPU's free memory, a quarter of free CPU memory, then in
    files.

    Args:
        folder: Folder of the files.
        device: Device of the model.

    Attributes:
        left: Bytes that may still be used, by device.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        free = {device: torch.cuda.mem_get_info(device)[0] // 2} if device.type == 'cuda' else {}
        memory = available_memory()
        self.left = {**free, torch.device('cpu'): MEMORY if memory is None else memory // 4}
        self.folder, self.device = folder, device
        # The device and the value, or None and the file.
        self.values: dict[str, tuple[torch.device | None, object]] = {}

    def put(self, name: str, value: object) -> None:
        """Stores a copy, because a view would keep the whole memory of its base."""
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
        """Returns a copy, because a forward may write into its input."""
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


def _copy_to(value: object, device: torch.device) -> object:
    return map_tensors(lambda tensor: tensor.to(device, copy=True), value)
