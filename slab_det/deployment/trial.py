"""Compares a deployed model with its original on a small noise image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.compare.difference import Comparison, accepted_difference, rms_difference
from slab_det.compare.features import extract_features, input_channels
from slab_det.compare.kernels import REMEDY, find_wrong_layers
from slab_det.compare.rounding import explain_rounding
from slab_det.runtime.copying import copy_module
from slab_det.runtime.errors import DeploymentError, name_some
from slab_det.runtime.tensors import tensors_in

# Multiples of 64, as some necks need; a hundredth of the pixels of a COCO image.
SIZE = (64, 128)
# Replaces these values of every test_cfg during the trial.
FEW_OBJECTS = dict(score_thr=0.0, max_per_img=20)


@torch.no_grad()
def try_deployed(model: nn.Module, deployed: nn.Module, dtype: torch.dtype | None) -> Comparison | None:
    """Compares the feature maps of a model and its deployed form, and runs the heads of both.

    Args:
        model: The original model.
        deployed: Its deployed form.
        dtype: The half precision of ``deployed``, or None.

    Returns:
        The comparison; None where ``model`` itself does not run on the image.

    Raises:
        DeploymentError: If ``deployed`` does not run, has feature maps that differ by more than rounding, has layers
            that a kernel of this machine computes wrong, or heads whose outputs are not finite.
    """
    kind, form = type(model).__name__, f'in {dtype}' if dtype else 'in its deployed form'
    remedy = 'deploy it in float32' if dtype else 'use the model as it is'
    check = None
    modes = ('features', 'tensor', 'predict') if hasattr(model, 'data_preprocessor') else ('features',)
    for mode in modes:
        try:
            reference = _run(model, mode) if mode != 'features' else _run(copy_module(model).double(), mode)
        except Exception as error:  # the model may need text, frames or larger images
            MMLogger.get_current_instance().warning(
                f'slab_det.deploy could not check {kind}: the original does not run on an image of {SIZE[0]}x{SIZE[1]} '
                f'({mode}: {_one_line(error)}); compare the results of both models on your own images'
            )
            continue
        try:
            with find_wrong_layers(deployed) as wrong:
                found = _run(deployed, mode)
        except Exception as error:
            raise DeploymentError(f'{kind} does not run {form} ({_one_line(error)}); {remedy}') from error
        if wrong:
            raise DeploymentError(
                f'{kind}: PyTorch {torch.__version__} computes wrong values {form} on this CPU for {name_some(wrong)}; '
                f'{remedy}, or {REMEDY}'
            )
        if mode == 'features':
            check = _compare(model, dtype or found[0].dtype, found, reference)
            if not check.same:
                fault = 'computes something else' if check.bound < math.inf else 'overflows'
                raise DeploymentError(f'{kind} {fault} {form}: {check}; {remedy}')
            if check.bound > 1:
                MMLogger.get_current_instance().warning(
                    f'slab_det.deploy: rounding to {found[0].dtype} alone changes the features of {kind} by '
                    f'{check.rounding:.0%} of their size, so that the check says little; measure its AP'
                )
        # Rounding changes the boxes that heads receive, so that their outputs cannot be compared.
        elif [all(x.isfinite().all() for x in outputs) for outputs in (reference, found)] == [True, False]:
            raise DeploymentError(f'{kind} overflows {form}: outputs of its heads are not finite; {remedy}')
    return check


def _compare(model: nn.Module, dtype: torch.dtype, found: Sequence[Tensor], reference: Sequence[Tensor]) -> Comparison:
    """Compares feature maps of the deployed model with ``reference``, of ``model`` in float64."""
    differences = [rms_difference(*pair) for pair in zip(found, reference, strict=True)]
    rounding = explain_rounding(model, dtype, partial(_run, mode='features'), reference)
    bounds = [accepted_difference(each, dtype) for each in rounding]
    worst = max(range(len(found)), key=lambda i: differences[i] / bounds[i])
    what, num_values = f'feature maps of noise, the worst at level {worst}', sum(x.numel() for x in found)
    return Comparison(what, num_values, differences[worst], rounding[worst], bounds[worst])


def _run(model: nn.Module, mode: str) -> list[Tensor]:
    """Runs a model on seeded noise; returns its feature maps ('features'), or its outputs in that mode of mmdet."""
    generator, shape = torch.Generator().manual_seed(0), (input_channels(model), *SIZE)
    if mode == 'features':
        return extract_features(model, torch.randn(1, *shape, generator=generator).to(next(model.parameters())))
    image = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
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


def _one_line(error: Exception) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())
