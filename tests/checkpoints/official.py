"""What the authors' code computes with their key names: weights and images drawn here, and the stored outputs.

tests/data/official_outputs.json.gz has the shapes of each state dict, and sketches of the outputs in float64. They were
computed head by head and token by token from the key names of PVT (github.com/whai362/PVT, detection/pvt.py and
pvt_v2.py), CSWin (github.com/microsoft/CSWin-Transformer, segmentation/backbone) and SLAB
(github.com/xinghaochen/SLAB), by tests/checkpoints/official_pvt.py and official_cswin.py of commit 25195966.
"""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

with gzip.open(Path(__file__).parents[1] / 'data' / 'official_outputs.json.gz') as file:
    STORED = json.load(file)


def fill(shapes: dict, counters: dict) -> dict[str, Tensor]:
    """A state dict of these shapes. numpy promises that the numbers of RandomState stay the same."""
    draw, state = np.random.RandomState(0).standard_normal, {}
    for key, shape in shapes.items():
        part = key.rpartition('.')[2]
        values = draw(shape) / math.sqrt(math.prod(shape[1:]) if len(shape) in (2, 4) else 2)
        if part in counters:
            values = np.int64(counters[part])
        elif part == 'running_var':
            values = abs(values) + 0.5
        elif part == 'weight' and len(shape) == 1:
            values += 1
        state[key] = torch.from_numpy(np.asarray(values))
    return state


def official_state(name: str) -> dict[str, Tensor]:
    return fill(STORED[name]['shapes'], STORED[name]['counters'])


def draw_image(height: int, width: int) -> Tensor:
    """Two images."""
    return torch.from_numpy(np.random.RandomState(1).standard_normal((2, 3, height, width)))


def sketch(maps: list[Tensor]) -> Tensor:
    """Three numbers for each map, each a sum over all of its values with random weights."""
    rows = []
    for values in maps:
        weights = np.random.RandomState(2).standard_normal((3, values.numel())) / values.numel() ** 0.5
        rows.append(torch.from_numpy(weights) @ values.detach().flatten())
    return torch.stack(rows)


def assert_official(model: nn.Module, name: str) -> None:
    """Compares the outputs of a model with the stored ones, at each of their sizes."""
    for size, expected in STORED[name]['outputs'].items():
        found = sketch(model(draw_image(*map(int, size.split('x')))))
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f'{name}, {size}')
