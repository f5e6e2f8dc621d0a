"""Compares a fused model with the unfused one on given inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slab_det.fusion.fuse import FusionError, apply_folds
from slab_det.norms import copy_module

# In float64 only rounding separates the two. In float32 random deep models differ from their own float64 self by
# more than any fixed bound, so that distance is the yardstick.
FLOAT64_BOUND = 1e-9
FLOAT32_FACTOR = 10.0


@dataclass(frozen=True)
class FusionCheck:
    """Largest differences over all inputs and outputs, relative to the largest value of each output.

    Attributes:
        float64: Fused against unfused, both in float64.
        float32: Fused against unfused, as they are.
        float32_own: The unfused model as it is against itself in float64.
        num_inputs: How many inputs were compared.
    """

    float64: float
    float32: float
    float32_own: float
    num_inputs: int


def extract_features(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """The feature maps of a detector's neck, or of a backbone, for images (B, 3, H, W)."""
    return model.extract_feat(images) if hasattr(model, 'extract_feat') else model(images)


@torch.no_grad()
def verify_fusion(
    model: nn.Module,
    fused: nn.Module,
    images: Iterable[Tensor],
    extract: Callable[[nn.Module, Tensor], tuple[Tensor, ...]] = extract_features,
) -> FusionCheck:
    """Measures how far ``fused`` is from ``model``, in their own dtype and in float64.

    Args:
        model: The unfused model, in eval mode.
        fused: What :func:`slab_det.fuse` made of it.
        images: Normalised images, (B, 3, H, W) each.
        extract: Runs a model on images.

    Raises:
        FusionError: If a difference breaks its bound or an output is not finite.
    """
    model64 = copy_module(model).double()
    fused64 = apply_folds(copy_module(model64), fused.fusion_report.norms)
    differences = []
    for image in images:
        reference = extract(model64, image.double())
        plain, folded = extract(model, image), extract(fused, image)
        folded64 = extract(fused64, image.double())
        differences.append([_relative(a, b) for a, b in ((folded64, reference), (folded, plain), (plain, reference))])
    if not differences:
        raise FusionError('there was no image to verify the fused model on')
    check = FusionCheck(*(max(column) for column in zip(*differences, strict=True)), len(differences))
    if not (check.float64 <= FLOAT64_BOUND and check.float32 <= FLOAT32_FACTOR * check.float32_own + FLOAT64_BOUND):
        raise FusionError(
            f'the fused model differs from the unfused one: {check}; do not use it, and please report '
            'this with the config'
        )
    return check


def _relative(outputs: tuple[Tensor, ...], references: tuple[Tensor, ...]) -> float:
    """The largest difference of any output, relative to the output's largest value; infinite if one is not finite."""
    pairs = zip(outputs, references, strict=True)
    # Of two outputs that are all zeros the difference is none.
    tiny = torch.finfo(torch.float64).tiny
    differences = [(a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=tiny) for a, b in pairs]
    return max(difference.item() if difference.isfinite() else float('inf') for difference in differences)
