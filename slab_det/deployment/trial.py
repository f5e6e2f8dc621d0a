"""Compares a deployed model with its original on a small noise image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.fusion.verify import FLOAT32_FACTOR, extract_features, relative_difference
from slab_det.norms import copy_module
from slab_det.runtime.errors import DeploymentError
from slab_det.runtime.tensors import tensors_in

# Multiples of 64, as some necks need; a hundredth of the pixels of a COCO image.
SIZE = (64, 128)
# Replaces these values of every test_cfg during the trial.
FEW_OBJECTS = dict(score_thr=0.0, max_per_img=20)
# Largest accepted DeploymentCheck.difference. Usual are 1e-6 in float32 and 0.01 in bfloat16, up to 0.4 after a hundred
# untrained layers. HALF_BOUND only catches wrong results; it says nothing about AP.
BOUND, HALF_BOUND = 0.01, 0.5


@dataclass(frozen=True)
class DeploymentCheck:
    """Difference between a deployed model and its original, on a noise image.

    Attributes:
        difference: Largest difference of the feature maps, relative to the largest value of a map.
        num_values: How many values were compared.
    """

    difference: float
    num_values: int


@torch.no_grad()
def try_deployed(model: nn.Module, deployed: nn.Module, dtype: torch.dtype | None) -> DeploymentCheck | None:
    """Compares the feature maps of a model and its deployed form, and runs the heads of both.

    Args:
        model: The original model.
        deployed: Its deployed form.
        dtype: The half precision of ``deployed``, or None.

    Returns:
        The comparison; None where ``model`` itself does not run on the image.

    Raises:
        DeploymentError: If ``deployed`` does not run, has feature maps that differ by more than rounding, or has heads
            whose outputs are not finite.
    """
    kind, form = type(model).__name__, f'in {dtype}' if dtype else 'in its deployed form'
    remedy = 'deploy it in float32' if dtype else 'use the model as it is'
    check = None
    modes = ('features', 'tensor', 'predict') if hasattr(model, 'data_preprocessor') else ('features',)
    for mode in modes:
        try:
            reference = _run(model, mode)
        except Exception as error:  # the model may need text, frames or other channels
            MMLogger.get_current_instance().warning(
                f'slab_det.deploy could not check {kind}: the original does not run on an image of {SIZE[0]}x{SIZE[1]} '
                f'({mode}: {_one_line(error)}); compare the results of both models on your own images'
            )
            continue
        try:
            found = _run(deployed, mode)
        except Exception as error:
            raise DeploymentError(f'{kind} does not run {form} ({_one_line(error)}); {remedy}') from error
        if mode == 'features':
            check = DeploymentCheck(relative_difference(found, reference), sum(x.numel() for x in reference))
            is_same = check.difference <= (HALF_BOUND if dtype else BOUND)
            is_same = is_same or check.difference <= _rounding(model, dtype, reference)
        else:
            # Rounding changes the boxes that heads receive, so that their outputs cannot be compared.
            is_same = _are_finite(found) or not _are_finite(reference)
        if not is_same:
            raise DeploymentError(f'{kind} computes something else {form}: {check}; {remedy}')
    return check


def _run(model: nn.Module, mode: str) -> list[Tensor]:
    """Runs a model on seeded noise; returns its feature maps ('features'), or its outputs in that mode of mmdet."""
    generator = torch.Generator().manual_seed(0)
    if mode == 'features':
        return extract_features(model, torch.randn(1, 3, *SIZE, generator=generator).to(next(model.parameters())))
    image = torch.randint(0, 256, (3, *SIZE), generator=generator, dtype=torch.uint8)
    metainfo = dict(img_shape=SIZE, ori_shape=SIZE, scale_factor=(1.0, 1.0), img_id=0, img_path='')
    data = model.data_preprocessor(dict(inputs=[image], data_samples=[DetDataSample(metainfo=metainfo)]), False)
    cfgs = [getattr(module, 'test_cfg', None) for module in model.modules()]
    cfgs = [cfg for cfg in cfgs if isinstance(cfg, dict)]
    before = [dict(cfg) for cfg in cfgs]
    try:
        for cfg in cfgs:
            # Some heads run only if an object is found; fewer proposals and objects save time.
            cfg.update({name: value for name, value in FEW_OBJECTS.items() if name in cfg})
        return tensors_in(model(**data, mode=mode))
    finally:
        for cfg, values in zip(cfgs, before, strict=True):
            cfg.clear()
            cfg.update(values)


def _are_finite(outputs: list[Tensor]) -> bool:
    return all(output.isfinite().all() for output in outputs)


def _rounding(model: nn.Module, dtype: torch.dtype | None, reference: list[Tensor]) -> float:
    """Ten times the rounding error of ``model`` in ``dtype``, which deep untrained models without norms amplify."""
    own = relative_difference(reference, _run(copy_module(model).double(), 'features'))
    return FLOAT32_FACTOR * own * torch.finfo(dtype or torch.float32).eps / torch.finfo(torch.float32).eps


def _one_line(error: Exception) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())
