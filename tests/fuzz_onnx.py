"""What must hold for a case of fuzz_cases.py that is exported: the file computes what the detector does."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from fuzz_cases import Case
from fuzz_checks import FLOAT32_FACTOR, build_model, distance
from torch import Tensor, nn

from slab_det.deployment.export import ExportError, export_onnx, load_runtime


def is_exported(case: Case) -> bool:
    """Whether a case is one that has an ONNX form: a sound detector without LayerNorm in its PRepBN."""
    return case.fault is None and case.part != 'backbone' and case.gamma == 0


def check_onnx(case: Case, folder: Path) -> float | str:
    """Raises AssertionError unless the exported file differs from the unfused detector by float32's rounding.

    At the case's size and at another one, which the file was not traced with either.

    Returns:
        The distance over the detector's own distance to its float64 self, or 'refused' if a part has no export form.
    """
    model = build_model(dataclasses.replace(case, dtype=torch.float32))
    path = folder / f'{case.seed}.onnx'
    try:
        export_onnx(model, path, 'backbone+neck+rpn')
    except ExportError:
        return 'refused'
    runtime = load_runtime(path, threads=1)
    model64 = copy.deepcopy(model).double()
    worst = 0.0
    for size in (case.size, (case.size[1] + 37, case.size[0] + 5)):
        generator = torch.Generator().manual_seed(case.seed)
        image = torch.rand(1, 3, *size, generator=generator) * 255
        found = [torch.from_numpy(output) for output in runtime.run(image.numpy()).values()]
        reference = maps(model64, image.double())
        assert [output.shape for output in found] == [output.shape for output in reference]
        apart, own = distance(found, reference), distance(maps(model, image), reference)
        worst = max(worst, apart / own)
        assert apart <= FLOAT32_FACTOR * own, f'{size}: ONNX and torch differ by {apart:g}, float32 rounding is {own:g}'
    return worst


@torch.no_grad()
def maps(model: nn.Module, image: Tensor) -> list[Tensor]:
    """The neck's maps, then objectness, then box deltas, of an image as it is read."""
    preprocessor = model.data_preprocessor
    image = (image.flip(1) - preprocessor.mean.view(3, 1, 1)) / preprocessor.std.view(3, 1, 1)
    height, width = image.shape[2:]
    features = model.extract_feat(F.pad(image, (0, -width % 32, 0, -height % 32)))
    logits, deltas = model.rpn_head(features)
    return [*features, *logits, *deltas]
