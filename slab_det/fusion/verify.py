"""Checks on given images that a fused model computes the same as the unfused model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from slab_det.backbones.adopt import adopt
from slab_det.common.batches import check_batch, check_batches
from slab_det.common.modules import copy_module, extract_features
from slab_det.common.tensors import check_finite
from slab_det.compare.difference import Comparison, accepted_difference, relative_difference
from slab_det.fusion.folding import FusionError, apply_folds

# A correct fusion differs by rounding alone. float64 rounds 2e-9 times as coarsely as float32: outputs that float32
# moves by 5 % move by 1e-10 in float64, a tenth of this bound.
FLOAT64_BOUND = 1e-9


@torch.no_grad()
def verify_fusion(
    model: nn.Module,
    fused: nn.Module,
    images: Iterable[Tensor],
    extract: Callable[[nn.Module, Tensor], tuple[Tensor, ...]] = extract_features,
) -> dict[str, Comparison]:
    """Compares the outputs of ``fused`` and ``model``, in their own dtype and in float64.

    Args:
        model: The unfused model, in eval mode.
        fused: The model that :func:`slab_det.fuse` returned for it.
        images: Normalised images, (B, 3, H, W) each.
        extract: Runs a model on images.

    Returns:
        The largest differences over all images by dtype: 'float64', and the dtype of the models if it is another one.

    Raises:
        DataError: If ``images`` are no batches of images, or do not fit the model.
        FusionError: If a difference exceeds its bound, an output is not finite, or there is nothing to compare.
    """
    check_finite(model, FusionError)
    model64 = copy_module(model).double()
    fused64 = copy_module(model64)
    adopt(fused64)
    apply_folds(fused64, fused.fusion_report.norms)
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
    float64, difference, rounding = map(max, zip(*differences, strict=True))
    dtype = plain[0].dtype
    explained = rounding * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    checks = {'float64': Comparison('feature maps in float64', num_values, float64, explained, FLOAT64_BOUND)}
    if dtype != torch.float64:
        name, bound = str(dtype).removeprefix('torch.'), accepted_difference(rounding, dtype)
        checks[name] = Comparison(f'feature maps in {name}', num_values, difference, rounding, bound)
    text = '; '.join(map(str, checks.values()))
    if not math.isfinite(difference + rounding):
        raise FusionError(f'the outputs of the models are not finite: {text}; take an earlier checkpoint')
    if not all(check.same for check in checks.values()):
        raise FusionError(
            f'the fused model differs from the unfused one: {text}; do not use it, and report this with the config'
        )
    return checks
