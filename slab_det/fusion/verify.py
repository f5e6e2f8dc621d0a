"""Checks on given images that a fused model computes the same as the unfused model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slab_det.fusion.fuse import FusionError, apply_folds
from slab_det.runtime.batches import check_batch, check_batches
from slab_det.runtime.copying import copy_module
from slab_det.runtime.errors import SlabDetError, name_some

# In float64 the two models differ by rounding alone. In float32 the rounding error of a deep model has no fixed bound:
# the bound is a multiple of the difference between the unfused model in float32 and in float64.
FLOAT64_BOUND = 1e-9
FLOAT32_FACTOR = 10.0


@dataclass(frozen=True)
class FusionCheck:
    """Largest differences over all inputs and outputs, relative to the largest value of each output.

    Attributes:
        float64: Between fused and unfused, both in float64.
        float32: Between fused and unfused in their own dtype.
        float32_own: Between the unfused model in its own dtype and in float64.
        num_values: Number of output values that were compared.
    """

    float64: float
    float32: float
    float32_own: float
    num_values: int


def extract_features(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """The feature maps of a detector's neck, or of a backbone, for images (B, 3, H, W)."""
    return model.extract_feat(images) if hasattr(model, 'extract_feat') else model(images)


def input_channels(model: nn.Module) -> int:
    """Number of channels of the images that a detector or backbone reads: its first convolution's, or 3 without one."""
    # Deployed models have convolutions of other classes.
    for module in getattr(model, 'backbone', model).modules():
        if hasattr(module, 'kernel_size') and hasattr(module, 'in_channels'):
            return module.in_channels
    return 3


def check_finite(model: nn.Module, error: type[SlabDetError] = FusionError) -> None:
    """Raises ``error``, which names them, if parameters or buffers of ``model`` hold NaN or infinite values."""
    # A tensor on the meta device has no values.
    state = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value) and not value.is_meta}
    damaged = [name for name, value in state.items() if not value.isfinite().all()]
    if damaged:
        raise error(
            f'{len(damaged)} of {len(state)} tensors hold NaN or infinite values ({name_some(damaged)}): '
            'the training diverged or the file is damaged; take an earlier checkpoint'
        )


@torch.no_grad()
def verify_fusion(
    model: nn.Module,
    fused: nn.Module,
    images: Iterable[Tensor],
    extract: Callable[[nn.Module, Tensor], tuple[Tensor, ...]] = extract_features,
) -> FusionCheck:
    """Compares the outputs of ``fused`` and ``model``, in their own dtype and in float64.

    Args:
        model: The unfused model, in eval mode.
        fused: The model that :func:`slab_det.fuse` returned for it.
        images: Normalised images, (B, 3, H, W) each.
        extract: Runs a model on images.

    Raises:
        DataError: If ``images`` are no batches of images, or do not fit the model.
        FusionError: If a difference exceeds its bound, an output is not finite, or there is nothing to compare.
    """
    check_finite(model)
    model64 = copy_module(model).double()
    fused64 = apply_folds(copy_module(model64), fused.fusion_report.norms)
    differences, num_values = [], 0
    check_batches(model, images)
    for image in images:
        check_batch(model, image)
        reference = extract(model64, image.double())
        plain, folded = extract(model, image), extract(fused, image)
        folded64 = extract(fused64, image.double())
        pairs = (folded64, reference), (folded, plain), (plain, reference)
        differences.append([relative_difference(*pair) for pair in pairs])
        num_values += sum(output.numel() for output in reference)
    if not num_values:
        raise FusionError('there is nothing to compare: the models have no output, or no image was given')
    check = FusionCheck(*(max(column) for column in zip(*differences, strict=True)), num_values)
    if not math.isfinite(check.float32 + check.float32_own):
        # The bound, a multiple of float32_own, may be infinite.
        raise FusionError(f'the outputs of the models are not finite: {check}; take an earlier checkpoint')
    if not (check.float64 <= FLOAT64_BOUND and check.float32 <= FLOAT32_FACTOR * check.float32_own + FLOAT64_BOUND):
        raise FusionError(
            f'the fused model differs from the unfused one: {check}; do not use it, and please report '
            'this with the config'
        )
    return check


def relative_difference(outputs: Iterable[Tensor], references: Iterable[Tensor]) -> float:
    """The largest difference over all outputs, each relative to the largest value of its reference.

    Infinite if an output is not finite or has another shape; 0 if both are all zeros or empty.
    """
    largest = 0.0
    for output, reference in zip(outputs, references, strict=True):
        output, reference = output.double(), reference.double()
        if output.shape != reference.shape or not output.isfinite().all():
            return math.inf
        if output.numel():
            scale = reference.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
            largest = max(largest, ((output - reference).abs().max() / scale).nan_to_num(math.inf).item())
    return largest
