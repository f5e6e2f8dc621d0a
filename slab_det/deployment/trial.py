"""Runs a deployed model once on a small image, beside the model that it was made of."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from mmengine.utils import apply_to
from torch import Tensor, nn

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
    """How far a deployed model is from the model that it was made of, on an image of noise.

    Attributes:
        difference: Root mean square of the difference over the root mean square of the reference, in the worst output.
            Outputs are the feature maps of a backbone, or what the heads of a detector return.
        num_values: How many values were compared.
    """

    difference: float
    num_values: int


@torch.no_grad()
def try_deployed(model: nn.Module, deployed: nn.Module, dtype: torch.dtype | None) -> DeploymentCheck | None:
    """Compares what two models compute from one image; None where ``model`` itself cannot run on it.

    Args:
        model: The model as it was given.
        deployed: Its deployed form.
        dtype: The half precision of ``deployed``, or None.

    Raises:
        DeploymentError: If ``deployed`` does not run, or returns other tensors, values that are not finite, or values
            that differ by more than rounding.
    """
    kind, form = type(model).__name__, f'in {dtype}' if dtype else 'in its deployed form'
    remedy = 'deploy it in float32' if dtype else 'use the model as it is'
    proposals: list = []
    check = None
    for mode in ('tensor', 'predict') if hasattr(model, 'data_preprocessor') else ('tensor',):
        try:
            reference = _run(model, mode, proposals)
        except Exception as error:  # the model asks for text, frames or other channels
            MMLogger.get_current_instance().warning(
                f'slab_det.deploy could not try {kind}, which does not run on an image of {SIZE[0]}x{SIZE[1]} itself '
                f'({mode}: {_one_line(error)}): compare its results with the results of the model before'
            )
            continue
        try:
            found = _run(deployed, mode, proposals)
        except Exception as error:
            raise DeploymentError(f'{kind} does not run {form} ({_one_line(error)}); {remedy}') from error
        if mode == 'tensor':
            check = _compare(found, reference)
            bound = HALF_BOUND if dtype else BOUND
            if not (check.difference <= bound or check.difference <= _rounding(model, dtype, reference, proposals)):
                raise DeploymentError(f'{kind} computes something else {form}: {check}; {remedy}')
    return check


def _run(model: nn.Module, mode: str, proposals: list) -> list[Tensor]:
    """The feature maps of a backbone for the image, or in mode 'tensor' what the heads of a detector return."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, *SIZE), generator=generator, dtype=torch.uint8)
    if hasattr(model, 'data_preprocessor'):
        metainfo = dict(img_shape=SIZE, ori_shape=SIZE, scale_factor=(1.0, 1.0), img_id=0, img_path='')
        data = model.data_preprocessor(dict(inputs=[image], data_samples=[DetDataSample(metainfo=metainfo)]), False)
        with _few_boxes(model, proposals):
            values = model(**data, mode=mode)
    else:
        values = model((image[None].to(next(model.parameters())) - 128) / 64)
    outputs = []
    apply_to(values, lambda x: isinstance(x, Tensor) and x.is_floating_point(), outputs.append)
    return outputs


@contextmanager
def _few_boxes(model: nn.Module, proposals: list) -> Iterator[None]:
    """Makes a detector find ``NUM_BOXES`` objects, whatever their scores, from the same proposals in all runs.

    By rounding, two models find different proposals, and then have different outputs.

    Args:
        model: The detector.
        proposals: The proposals of the first run, which adds them.
    """
    cfgs = [getattr(module, 'test_cfg', None) for module in model.modules()]
    cfgs = [cfg for cfg in cfgs if isinstance(cfg, dict) and 'score_thr' in cfg]
    before = [dict(cfg) for cfg in cfgs]
    rpn_head = getattr(model, 'rpn_head', None)

    def predict_fixed(*args: Any, **options: Any) -> list:
        found = type(rpn_head).predict(rpn_head, *args, **options)
        proposals.extend(found[len(proposals) :])
        return copy.deepcopy([boxes[:NUM_BOXES] for boxes in proposals])

    try:
        for cfg in cfgs:
            cfg.update(score_thr=0.0, max_per_img=NUM_BOXES)
        if rpn_head is not None:
            rpn_head.predict = predict_fixed
        yield
    finally:
        for cfg, values in zip(cfgs, before, strict=True):
            cfg.clear()
            cfg.update(values)
        if rpn_head is not None:
            del rpn_head.predict


def _compare(outputs: list[Tensor], references: list[Tensor]) -> DeploymentCheck:
    if [x.shape for x in outputs] != [x.shape for x in references]:
        return DeploymentCheck(math.inf, 0)
    largest, num_values = 0.0, 0
    for output, reference in zip(outputs, references, strict=True):
        # Masked logits are infinite in both.
        finite = reference.isfinite()
        output, reference = output[finite].double(), reference[finite].double()
        if output.numel():
            scale = reference.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
            difference = (output - reference).square().mean().sqrt() / scale
            largest = max(largest, difference.nan_to_num(math.inf).item())
            num_values += output.numel()
    return DeploymentCheck(largest if num_values else math.inf, num_values)


def _rounding(model: nn.Module, dtype: torch.dtype | None, reference: list[Tensor], proposals: list) -> float:
    """Ten times the part of the difference that rounding explains: untrained deep models without norms amplify it."""
    own = _compare(reference, _run(copy_module(model).double(), 'tensor', proposals)).difference
    return 10 * own * torch.finfo(dtype or torch.float32).eps / torch.finfo(torch.float32).eps


def _one_line(error: Exception) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())
