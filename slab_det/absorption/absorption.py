"""absorb: removes hidden channels and LayerNorms of a trained detector, without training and without labels."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable
from numbers import Real
from pathlib import Path

import torch
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from torch import nn

from slab_det.absorption.absorption_report import KEPT_BY_CHOICE, AbsorptionReport, NormAbsorption
from slab_det.absorption.channels.judge import Judge
from slab_det.absorption.channels.observed import Observer
from slab_det.absorption.channels.prices import measure_prices
from slab_det.absorption.channels.survey import Survey
from slab_det.absorption.images import read_images
from slab_det.absorption.norms.blocks import absorb_norms
from slab_det.absorption.norms.plan import NormPlan, plan_norms
from slab_det.backbones.adopt import adopt
from slab_det.common.errors import ComparisonError, ConversionError
from slab_det.common.modules import copy_module, is_deployed, set_mode
from slab_det.fusion.folding import FusionReport, earlier_report

# Least share of the AP that the student of channels='auto' retains; with less, a warning is given.
LEAST_RETAINED_AP = 0.99


def absorb(
    model: nn.Module,
    images: Iterable,
    channels: float | str = 'auto',
    norms: str | Collection[str] = 'keep',
    int8: bool = False,
    work_dir: str | Path | None = None,
    progress: bool = True,
    compare: bool = True,
) -> nn.Module:
    """Removes hidden channels and LayerNorms of a trained model that it does not need.

    The student is a copy of the teacher, ``model``. By default it loses hidden channels and keeps all norms. A layer
    that reads fewer channels x_s of x is fitted to what it computes in the teacher,

        M, t = argmin  E |W x + b - M x_s - t|^2 + r |(M - W_s) diag(sigma)|^2.

    Norms go after the channels, from the first to the last. A LayerNorm that goes is replaced by an affine map and
    folded into the linear layers that read it. It is fitted by a ridge regression of the teacher's output y on the
    student's input x,

        M, t = argmin  E |y - M x - t|^2 + r |(M - D) diag(sigma)|^2,

    and the layers that read the norm take the map: ``W y + b`` becomes ``(W M) x + (b + W t)``. D is the best scale per
    channel of the centred input. The last layer of each attention and each FFN is fitted in the same way, so that the
    student's residual stream approaches the teacher's. At the end the 3x3 convolutions of an FPN are fitted to the
    teacher's feature maps. The ridges of norms and of these layers are chosen on every fifth batch, which is held out
    from all fits.

    The student is fused already: an absorbed norm is no longer a module. ``student.absorption_report`` gives the error
    of each fit, and ``student.fusion_report`` names the layers that each norm was folded into.

    Args:
        model: A detector or a backbone with LayerNorm: ours or mmdet's Swin, PVT or PVTv2, or any for which
            :func:`slab_det.fusion.register_folds` names the readers of the norms.
        images: Batches of a data loader without labels, or image tensors (B, 3, H, W) for a detector that needs
            neither text nor frames: about a hundred images like those that the detector will see. They are read once,
            ``len(images)`` batches where the length is known.
        channels: Share of the detector's multiply-adds that stays, at the size of the first image; 1 leaves all hidden
            channels. Channels go in FFNs, in the heads of softmax attention, and in the FPN, RPN, box heads and mask
            heads of a Faster, Mask or Cascade R-CNN or the FPN and towers of a RetinaNet, ATSS, FCOS or RTMDet: first
            where they cost least for each multiply-add that they save. Where the detector finds objects in the images,
            the price of a kind of layers is measured: the share of the AP that a draft loses, which is a student
            without most channels of this kind.
            'auto' takes the least share, to 1/32, with which a draft retains ``LEAST_RETAINED_AP`` of the teacher's AP
            (:func:`~slab_det.compare.ruler.retained_ap`) in images that it is not fitted on.
        norms: 'keep' leaves all LayerNorms, 'remove' absorbs those that can be absorbed; or the names of those that
            stay while the others are absorbed.
        int8: The student will be quantized: every fit adds the penalty ``q |M - D|^2``, where q is the variance of the
            int8 rounding error of x, so that the weights do not amplify this error. It costs some AP in float32.
        work_dir: A folder for prices and for blocks whose norms are absorbed; a later call with the same arguments and
            images resumes from it.
        progress: Show a progress bar.
        compare: Estimate which share of the teacher's AP the student retains, from detections in the held-out batches,
            of large images in the crops that the fits read.

    Returns:
        The fused student, in eval mode; ``model`` is left as it is.

    Raises:
        ConversionError: If no LayerNorm can be absorbed and no hidden channel removed, there are no images,
            ``channels`` is invalid or less than what must stay, ``norms`` is invalid or names a norm that cannot be
            absorbed, an attention has hooks, the model is wrapped or deployed, or values are not finite.
        DataError: If ``images`` are no batches of images, or do not fit the model.
        FusionError: If the model has norms of slab_det that cannot be fused.
    """
    if is_model_wrapper(model):
        raise ConversionError(f'the model is wrapped in a {type(model).__name__}; give model.module')
    if is_deployed(model):
        raise ConversionError('the model is deployed, which hides its norms; absorb the detector before deploying it')
    _check_channels(channels)
    norms = _check_norms(norms)
    if channels == 1 and norms == 'keep':
        raise ConversionError(
            "channels=1 and norms='keep' leave nothing to absorb; give channels=0.5 or norms='remove'"
        )
    # find_reads uses autograd, which records nothing in inference mode.
    with torch.inference_mode(False), tempfile.TemporaryDirectory(prefix='slab_det_absorb_') as folder:
        model = copy_module(model)
        adopt(model)
        set_mode(model, False)
        stored = read_images(model, images, Path(folder), heads=channels != 1)
        plan = plan_norms(model, stored, norms, int8)
        student = plan.copy_teacher()
        observer = Observer(copy_module(student), stored, int8) if channels != 1 else None
        if not (plan.absorbed or observer and observer.units):
            raise ConversionError(_why_nothing_goes(plan, observer))
        judge, report, work_dir = Judge(model, stored), AbsorptionReport(), Path(work_dir or folder)
        if channels == 'auto' and not judge.can_compare:
            raise ConversionError(
                "channels='auto' compares detections: give a detector (not in float64), or a number: channels=0.5 for "
                'half of the multiply-adds, channels=1 for all'
            )
        maps, can_lose_channels = {}, False
        if observer:
            survey = Survey(observer, progress)
            survey.prices = measure_prices(survey, judge, work_dir)
            share = find_least_share(survey, judge, progress) if channels == 'auto' else channels
            maps = survey.prune(student, survey.choose(share), report)
            can_lose_channels = bool(survey.estimates)
            # Its sums take gigabytes.
            del survey
        if plan.absorbed:
            absorb_norms(plan, student, maps, report, work_dir, progress)
        report.norms += [NormAbsorption(name, 'kept', reason=reason) for name, reason in plan.reasons.items() if reason]
        past = earlier_report(model)
        student.absorption_report = report
        student.fusion_report = FusionReport([*past.norms, *plan.fusions.values()], past.channels | report.counts)
        if compare:
            judge.fill(report, student)
    _warn(student.absorption_report, can_lose_channels)
    return student


def _why_nothing_goes(plan: NormPlan, observer: Observer | None) -> str:
    """Why neither norms nor channels can go."""
    why = '; '.join(dict.fromkeys(plan.reasons.values())) or 'it has none'
    if observer is None:
        return (
            f'the model has no LayerNorm that can be absorbed: {why}; give a detector with LayerNorm, fewer names of '
            'norms that stay, or channels=0.5 to remove hidden channels'
        )
    parts = [] if why == KEPT_BY_CHOICE else [f'no LayerNorm that can be absorbed: {why}']
    why = '; '.join(dict.fromkeys(observer.reasons.values())) or 'none of its layers is known to have any'
    parts.append(f'no hidden channels that can be removed: {why}')
    return f'the model has {", and ".join(parts)}; give a detector with a Swin, PVT or PVTv2'


def _check_channels(channels: object) -> None:
    if channels != 'auto' and (isinstance(channels, bool) or not isinstance(channels, Real) or not 0 < channels <= 1):
        raise ConversionError(
            f"channels={channels!r}: give the share of multiply-adds that stays, such as 0.5, 1 for all, or 'auto'"
        )


def _check_norms(norms: object) -> str | Collection[str]:
    names = (norms,) if isinstance(norms, str) else norms
    if not (isinstance(names, Collection) and all(isinstance(name, str) for name in names)):
        raise ConversionError(f"norms={norms!r}: give 'keep', 'remove' or names of LayerNorms that stay")
    return norms if norms in ('keep', 'remove') else names


def find_least_share(survey: Survey, judge: Judge, progress: bool) -> float:
    """Returns the least share of multiply-adds with which a draft retains the teacher's AP, found by bisection.

    Args:
        survey: Chooses the channels for a share, and makes drafts.
        judge: Compares drafts with the teacher.
        progress: Print the retained AP of each draft.

    Raises:
        ConversionError: If the teacher finds nothing that it finds again in mirrored images.
    """
    # Shares of 1 / 32. Invariant: no channel has to go for ``high``, or a draft with ``high`` retains enough.
    low, high = math.ceil(32 * survey.least_share()) - 1, 32
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found = survey.judge_draft(judge, survey.choose(middle / 32)).value
        except ComparisonError as error:
            raise ConversionError(
                "channels='auto': the teacher finds nothing in the images that it finds again in the mirrored images, "
                'so nothing shows what a student loses; give images of its objects, or channels=0.5'
            ) from error
        if progress:
            print(f'{middle / 32:.2f} of the multiply-adds left: {found:.1%} of the AP retained in a draft')
        low, high = (low, middle) if found >= LEAST_RETAINED_AP else (middle, high)
    return high / 32


def _warn(report: AbsorptionReport, can_lose_channels: bool) -> None:
    warn = MMLogger.get_current_instance().warning
    if report.channels and not can_lose_channels:
        warn(f'no hidden channel was removed: {report.channels[0].reason}')
    elif can_lose_channels and not report.pruned:
        warn(
            f'no hidden channel was removed: no student with fewer retains {LEAST_RETAINED_AP:.0%} of the AP; give a '
            'number, such as channels=0.9'
        )
    if report.num_images and report.retained_ap is None:
        warn(
            f'{report.why_unknown()}: {len(report.kept)} LayerNorms are '
            'kept, and the loss of AP is unknown; give images of its objects'
        )
    elif report.retained_ap is not None and report.retained_ap < LEAST_RETAINED_AP:
        remedies = ['remove fewer hidden channels'] if report.pruned else []
        remedies += ['keep more norms (norms=)'] if len(report.kept) < len(report.norms) else []
        remedies.append('train towards the teacher (slab_det.conversion.write_tune_config)')
        warn(
            f'{report.retained_ap:.1%} of the AP are retained, less than {LEAST_RETAINED_AP:.0%}, with '
            f'{len(report.kept)} LayerNorms kept; {report.describe_loss()}; {" or ".join(remedies)}'
        )
