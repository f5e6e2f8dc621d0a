"""Compares a deployed model with its original on a small noise image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.common.errors import DeploymentError, name_error, name_some
from slab_det.common.modules import changed_test_cfgs, copy_module, extract_features, input_channels
from slab_det.common.tensors import HALF_PRECISIONS, tensors_in
from slab_det.compare.difference import Comparison, accepted_difference, explain_rounding, rms_difference
from slab_det.compare.kernels import REMEDY, find_wrong_layers

# Multiples of 64, as some necks need; a hundredth of the pixels of a COCO image.
TRIAL_SIZE = (64, 128)
# Replaces these values of every test_cfg during the trial.
FEW_OBJECTS = dict(score_thr=0.0, max_per_img=20)
# Refused is what differs on each of these images: near a discontinuity, such as a quotient of two sums that are nearly
# zero in linear attention, rounding may change a few tokens by much more in one run than in another.
NUM_IMAGES = 4
# Multiplies the bound in float32 and float64, because other kernels than the original's round more: Winograd's
# convolution 13 times, and PyTorch's GroupNorm of channels-last maps 60 times where means are five times the
# deviations. One wrong value in a map exceeds rounding more than a thousand times.
KERNEL_FACTOR = 10.0


@torch.no_grad()
def try_deployed(model: nn.Module, deployed: nn.Module, dtype: torch.dtype | None) -> Comparison | None:
    """Compares the feature maps of a model and its deployed form, and runs the heads of both.

    ``dtype`` is the half precision of ``deployed``, or None.

    Returns:
        The comparison; None where ``model`` itself does not run on the image.

    Raises:
        DeploymentError: If ``deployed`` does not run, has feature maps that differ by more than rounding, has layers
            that a kernel of this machine computes wrong, or heads whose outputs are not finite.
    """
    # Autocast would round both forms alike.
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        check = _try_features(model, deployed, dtype)
        if hasattr(model, 'data_preprocessor'):
            # Rounding changes the boxes that heads receive, so that their outputs cannot be compared.
            for mode in ('tensor', 'predict'):
                _run_both(model, deployed, dtype, mode)
    return check


def _try_features(model: nn.Module, deployed: nn.Module, dtype: torch.dtype | None) -> Comparison | None:
    precision = dtype or next(model.parameters()).dtype
    for seed in range(NUM_IMAGES):
        outputs = _run_both(model, deployed, dtype, 'features', seed)
        if outputs is None:
            return None
        found, reference = outputs
        if not (reference and _are_finite(reference)):
            _warn(f'slab_det.deploy could not check {type(model).__name__}: its features are no tensors or not finite')
            return None
        check = _compare(model, precision, found, reference, seed)
        if check.difference <= check.bound:
            # Maps that have nothing in common differ by about 1.
            if check.bound > 1:
                _warn(
                    f'slab_det.deploy: rounding to {precision} alone changes the features of {type(model).__name__} by '
                    f'{check.rounding:.0%} of their size, so that the check says little; measure its AP'
                )
            return check
    form, remedy = _form(dtype)
    raise DeploymentError(f'{type(model).__name__} computes something else {form}: {check}; {remedy}')


def _run_both(
    model: nn.Module, deployed: nn.Module, dtype: torch.dtype | None, mode: str, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Outputs of ``deployed`` and of ``model``; None, after a warning, where ``model`` does not run."""
    kind, (form, remedy) = type(model).__name__, _form(dtype)
    try:
        # A copy, because another thread may use the model while _run changes its test_cfg.
        reference = _reference(model, seed) if mode == 'features' else _run(copy_module(model), mode)
    except Exception as error:  # the model may need text, frames or larger images
        _warn(
            f'slab_det.deploy could not check {kind}: the original does not run on an image of '
            f'{TRIAL_SIZE[0]}x{TRIAL_SIZE[1]} ({mode}: {name_error(error)}); compare the results of both models on '
            'your own images'
        )
        return None
    try:
        with find_wrong_layers(deployed) as wrong:
            found = _run(deployed, mode, seed)
    except Exception as error:
        raise DeploymentError(f'{kind} does not run {form} ({name_error(error)}); {remedy}') from error
    if wrong:
        raise DeploymentError(
            f'{kind}: PyTorch {torch.__version__} computes wrong values {form} on this CPU for {name_some(wrong)}; '
            f'{remedy}, or {REMEDY}'
        )
    if _are_finite(reference) and not _are_finite(found):
        what = 'feature maps' if mode == 'features' else 'outputs of its heads'
        raise DeploymentError(f'{kind} overflows {form}: {what} are not finite; {remedy}')
    return found, reference


def _form(dtype: torch.dtype | None) -> tuple[str, str]:
    """How messages call the deployed form, and what they advise instead."""
    if dtype is None:
        return 'in its deployed form', 'use the model as it is'
    return f'in {dtype}', 'deploy it in float32'


def _reference(model: nn.Module, seed: int) -> list[Tensor]:
    """Feature maps of ``model`` in float64, or in float32 where it has operators that need float32."""
    with suppress(Exception):
        return _run(copy_module(model).double(), 'features', seed)
    return _run(copy_module(model).float(), 'features', seed)


def _compare(
    model: nn.Module, dtype: torch.dtype, found: Sequence[Tensor], reference: Sequence[Tensor], seed: int
) -> Comparison:
    """Compares feature maps of the deployed model with ``reference``, of ``model`` in float64."""
    differences = [rms_difference(*pair) for pair in zip(found, reference, strict=True)]
    rounding = explain_rounding(model, dtype, partial(_run, mode='features', seed=seed), reference)
    factor = 1.0 if dtype in HALF_PRECISIONS else KERNEL_FACTOR
    bounds = [factor * accepted_difference(each, dtype) for each in rounding]
    worst = max(range(len(found)), key=lambda i: differences[i] / bounds[i])
    what, num_values = f'feature maps of noise, the worst at level {worst}', sum(x.numel() for x in found)
    return Comparison(what, num_values, differences[worst], rounding[worst], bounds[worst])


def _run(model: nn.Module, mode: str, seed: int = 0) -> list[Tensor]:
    """Runs a model on seeded noise; returns its feature maps ('features'), or its outputs in that mode of mmdet."""
    generator, shape = torch.Generator().manual_seed(seed), (input_channels(model), *TRIAL_SIZE)
    if mode == 'features':
        outputs = extract_features(model, torch.randn(1, *shape, generator=generator).to(next(model.parameters())))
        return [x for x in tensors_in(outputs) if x.is_floating_point()]
    image = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    metainfo = dict(img_shape=TRIAL_SIZE, ori_shape=TRIAL_SIZE, scale_factor=(1.0, 1.0), img_id=0, img_path='')
    data = model.data_preprocessor(dict(inputs=[image], data_samples=[DetDataSample(metainfo=metainfo)]), False)
    # Some heads run only if an object is found; fewer proposals and objects save time.
    with changed_test_cfgs(model, lambda cfg: {name: value for name, value in FEW_OBJECTS.items() if name in cfg}):
        return tensors_in(model(**data, mode=mode))


def _are_finite(outputs: Sequence[Tensor]) -> bool:
    return all(output.isfinite().all() for output in outputs)


def _warn(message: str) -> None:
    MMLogger.get_current_instance().warning(message)
