"""Compares a deployed model with its original on a small image, before anyone uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.fusion.verify import extract_features
from slab_det.norms import copy_module
from slab_det.runtime.errors import DeploymentError

# Sides that halve six times, as some necks ask for; a hundredth of the pixels of a COCO image.
SIZE = (64, 128)
# Number of proposals and of objects: RoI heads take most of the time of so small an image.
NUM_BOXES = 20
# Largest DeploymentCheck.difference. float32 has about 1e-6, bfloat16 0.01, behind a hundred untrained layers up to
# 0.4: the bound of half precision refuses nonsense and says nothing about AP.
BOUND, HALF_BOUND = 0.01, 0.5


@dataclass(frozen=True)
class DeploymentCheck:
    """How far the feature maps of a deployed model are from the maps of its original, on an image of noise.

    Attributes:
        difference: Root mean square of the difference over the root mean square of the original, of the worst map.
        num_values: How many values were compared.
    """

    difference: float
    num_values: int


@torch.no_grad()
def try_deployed(model: nn.Module, deployed: nn.Module, dtype: torch.dtype | None) -> DeploymentCheck | None:
    """Runs two models on one image, and compares their feature maps; None where ``model`` itself cannot run on it.

    Args:
        model: The model as it was given.
        deployed: Its deployed form.
        dtype: The half precision of ``deployed``, or None.

    Raises:
        DeploymentError: If ``deployed`` does not run, or its maps have other shapes, values that are not finite, or
            values that differ by more than rounding.
    """
    kind, form = type(model).__name__, f'in {dtype}' if dtype else 'in its deployed form'
    remedy = 'deploy it in float32' if dtype else 'use the model as it is'
    check = None
    for run in (_features, _predict) if hasattr(model, 'data_preprocessor') else (_features,):
        try:
            reference = run(model)
        except Exception as error:  # the model asks for text, frames or other channels
            MMLogger.get_current_instance().warning(
                f'slab_det.deploy could not try {kind}, which does not run on an image of {SIZE[0]}x{SIZE[1]} itself '
                f'({_one_line(error)}): compare the results of the two'
            )
            return check
        try:
            found = run(deployed)
        except Exception as error:
            raise DeploymentError(f'{kind} does not run {form} ({_one_line(error)}); {remedy}') from error
        if run is _features:
            check = _compare(found, reference)
            bound = HALF_BOUND if dtype else BOUND
            if not (check.difference <= bound or check.difference <= _rounding(model, dtype, reference)):
                raise DeploymentError(f'{kind} computes something else {form}: {check}; {remedy}')
    return check


def _features(model: nn.Module) -> Sequence[Tensor]:
    image = (_noise()[None].to(next(model.parameters())) - 128) / 64
    return extract_features(model, image)


def _predict(model: nn.Module) -> None:
    """Lets a copy of a detector find ``NUM_BOXES`` objects, whatever their scores, so that every head runs."""
    model = copy_module(model)
    for module in model.modules():
        cfg = getattr(module, 'test_cfg', None)
        if isinstance(cfg, dict) and 'max_per_img' in cfg:
            cfg.update(max_per_img=NUM_BOXES, score_thr=0.0)
    metainfo = dict(img_shape=SIZE, ori_shape=SIZE, scale_factor=(1.0, 1.0), img_id=0, img_path='')
    model.test_step(dict(inputs=[_noise()], data_samples=[DetDataSample(metainfo=metainfo)]))


def _noise() -> Tensor:
    return torch.randint(0, 256, (3, *SIZE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def _compare(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> DeploymentCheck:
    if [x.shape for x in outputs] != [x.shape for x in references]:
        return DeploymentCheck(math.inf, 0)
    pairs = [(x.double(), reference.double()) for x, reference in zip(outputs, references, strict=True)]
    tiny = torch.finfo(torch.float64).tiny
    differences = [((x - y).square().mean() / y.square().mean().clamp(min=tiny)).sqrt() for x, y in pairs]
    largest = max(difference.nan_to_num(math.inf).item() for difference in differences)
    return DeploymentCheck(largest, sum(x.numel() for x in outputs))


def _rounding(model: nn.Module, dtype: torch.dtype | None, reference: Sequence[Tensor]) -> float:
    """Ten times the part of the difference that rounding explains: untrained deep models without norms amplify it."""
    own = _compare(reference, _features(copy_module(model).double())).difference
    return 10 * own * torch.finfo(dtype or torch.float32).eps / torch.finfo(torch.float32).eps


def _one_line(error: Exception) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())
