"""absorb: removes hidden channels and LayerNorms of a trained detector, without training and without labels."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from numbers import Integral, Real
from pathlib import Path

import torch
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from torch import nn

from slab_det.absorption.absorption_report import AbsorptionReport, ChannelAbsorption
from slab_det.absorption.budget import Survey
from slab_det.absorption.images import HELD_OUT, Images
from slab_det.absorption.plan import AbsorptionPlan, make_plan
from slab_det.absorption.student import absorb_norms
from slab_det.backbones.adopt import adopt
from slab_det.compare.detections import detect
from slab_det.compare.ruler import retained_ap
from slab_det.runtime.copying import copy_module
from slab_det.runtime.errors import ComparisonError, ConversionError
from slab_det.runtime.modes import is_deployed, set_mode

# Least share of the AP that the student of channels='auto' retains; with less, a warning is given.
LEAST_RETAINED_AP = 0.99
# Batches that students are fitted on in the search for a share. The student that is returned is fitted on all.
SEARCH = 40


def absorb(
    model: nn.Module,
    images: Iterable,
    keep: int | str | Collection[str] | None = None,
    int8: bool = False,
    work_dir: str | Path | None = None,
    progress: bool = True,
    ffn: float = 0.0,
    channels: float | str | None = None,
    compare: bool = True,
) -> nn.Module:
    """Removes hidden channels and LayerNorms of a trained model that it does not need.

    The student is a copy of the teacher, ``model``. By default it loses hidden channels and keeps all norms. Where
    channels go, the layers that read them are fitted to the teacher's values on the student's inputs.

    A LayerNorm that does not stay is replaced by an affine map and folded into the linear layers that read it. The
    norms are replaced from the first to the last. Each is fitted by a ridge regression of the teacher's output y on the
    student's input x,

        M, t = argmin  E |y - M x - t|^2 + r |(M - D) diag(sigma)|^2,

    and the layers that read the norm take the map: ``W y + b`` becomes ``(W M) x + (b + W t)``. D is the best scale per
    channel of the centred input. The last layer of each attention and each FFN is fitted in the same way, so that the
    student's residual stream approaches the teacher's. At the end the 3x3 convolutions of an FPN are fitted to the
    teacher's feature maps. The ridges r are chosen on every fifth batch, which is held out from all fits.

    The student is fused already: an absorbed norm is no longer a module. ``student.absorption_report`` gives the error
    of each fit, and ``student.fusion_report`` names the layers that each norm was folded into.

    Args:
        model: A detector or a backbone with LayerNorm: ours or mmdet's Swin, PVT or PVTv2, or any for which
            :func:`slab_det.fusion.register_folds` names the readers of the norms.
        images: Batches of a data loader without labels, or image tensors (B, 3, H, W) for a detector that needs
            neither text nor frames: about a hundred images like those that the detector will see. They are read once,
            ``len(images)`` batches where the length is known.
        keep: Norms that stay LayerNorm: 'all', the default; 'none'; a whole number K, for the K least affine norms
            (:attr:`NormAbsorption.own`); one name or several; or 'auto'. 'auto' keeps the fewest norms with which the
            :func:`~slab_det.compare.ruler.retained_ap` of student and teacher on the held-out images reaches
            ``LEAST_RETAINED_AP``: no norm, or a bisected number of the least affine norms, at most a quarter. If no
            student reaches it, the best student is returned. If the teacher detects nothing, a quarter is kept.
        int8: The student will be quantized: every fit adds the penalty ``q |M - D|^2``, where q is the variance of the
            int8 rounding error of x, so that the weights do not amplify this error. It costs some AP in float32.
        work_dir: A folder for finished blocks; a later call with the same arguments and images resumes from it.
        progress: Show a progress bar.
        ffn: Share of the hidden channels to remove from each FFN, 0 <= ffn < 1: the channels whose removal costs
            least after the second layer is refitted. A multiple of 8 channels stays, at least 8. With
            ``keep='auto'`` the agreement is measured with the FFNs pruned.
        channels: Removes hidden channels everywhere: in FFNs, in the heads of softmax attention, and in the FPN, RPN,
            box heads and mask heads of a Faster, Mask or Cascade R-CNN or the FPN and towers of a RetinaNet, ATSS, FCOS
            or RTMDet. A number from 0 to 1 is the share of the detector's multiply-adds that stays, at the size of the
            first image; channels go first where they are estimated to cost least for each multiply-add that they save.
            'auto' takes the least share, to 1/32, with which a student that keeps all norms retains
            ``LEAST_RETAINED_AP`` of the teacher's AP (:func:`~slab_det.compare.ruler.retained_ap`). None removes none,
            but is 'auto' if neither ``keep`` nor ``ffn`` is given.
        compare: Estimate which share of the teacher's AP the student retains. It takes three predictions of each
            held-out image.

    Returns:
        The fused student, in eval mode; ``model`` is left as it is.

    Raises:
        ConversionError: If no LayerNorm can be absorbed and no hidden channel removed, there are no images, ``keep`` is
            invalid, leaves nothing to absorb, or names no norm that can be absorbed, ``channels`` is invalid or less
            than what must stay, an attention has hooks, the model is wrapped or deployed, or values are not finite.
        DataError: If ``images`` are no batches of images, or do not fit the model.
        FusionError: If the model has norms of slab_det that cannot be fused.
    """
    if is_model_wrapper(model):
        raise ConversionError(f'the model is wrapped in a {type(model).__name__}; give model.module')
    if is_deployed(model):
        raise ConversionError('the model is deployed, which hides its norms; absorb the detector before deploying it')
    if keep is None and channels is None and not ffn:
        channels = 'auto'
    keep = _check_keep('all' if keep is None else keep)
    if not 0 <= ffn < 1:
        raise ConversionError(f'ffn={ffn}: give a share from 0 to below 1, such as 0.75')
    channels = _check_channels(channels, ffn)
    if keep == 'all' and not (ffn or channels):
        raise ConversionError("keep='all' leaves nothing to absorb; give channels=0.5, ffn=0.75 or another keep")
    # find_reads uses autograd, which records nothing in inference mode.
    with torch.inference_mode(False), tempfile.TemporaryDirectory(prefix='slab_det_absorb_') as folder:
        model = copy_module(model)
        adopt(model)
        set_mode(model, False)
        where = 'everywhere' if channels else 'ffn' if ffn else ''
        plan = make_plan(model, images, Path(folder), int8, where, norms=keep != 'all')
        _check_absorbs(keep, plan, bool(where))
        is_auto = 'auto' in (keep, channels)
        judge = _compare_to(model, plan.images) if compare or is_auto else None
        if judge is None and is_auto:
            option = 'keep' if keep == 'auto' else 'channels'
            raise ConversionError(
                f"{option}='auto' compares detections: give a detector (not in float64), or a number: keep=K to keep "
                'K norms, channels=0.5 for half of the multiply-adds'
            )
        make = partial(absorb_norms, plan, work_dir=work_dir and Path(work_dir), progress=progress)
        if channels:
            survey = Survey(plan)
            if channels == 'auto':
                quick = partial(absorb_norms, plan.shorten(SEARCH), work_dir=make.keywords['work_dir'], progress=False)
                channels = find_least_share(survey, plan, quick, judge, progress)
            counts = survey.choose(channels)
        make = partial(make, channels=counts if channels else float(ffn))
        if keep == 'auto':
            student = absorb_until_agreement(make, judge, progress)
        else:
            if isinstance(keep, Integral):
                keep = make().absorption_report.rank()[:keep] if keep else ()
            student = make(() if keep == 'all' else keep)
            if judge is not None:
                judge(student)
        if channels:
            report = student.absorption_report
            report.multiply_adds = survey.total, survey.count(plan, student)
            reason = 'too few tokens or regions of the images reach it; give more images'
            report.channels += [ChannelAbsorption(name, reason=reason) for name in survey.unknown]
    _warn(student.absorption_report)
    return student


def _check_keep(keep: object) -> int | Collection[str]:
    names = (keep,) if isinstance(keep, str) else keep
    if isinstance(names, Collection) and all(isinstance(name, str) for name in names):
        return {('none',): 0, ('all',): 'all', ('auto',): 'auto'}.get(tuple(names), names)
    if isinstance(keep, Integral) and not isinstance(keep, bool) and keep >= 0:
        return keep
    raise ConversionError(f"keep={keep!r}: give a whole number from 0 on, names of LayerNorms, 'none', 'all' or 'auto'")


def _check_channels(channels: object, ffn: float) -> float | str | None:
    if (
        channels is None
        or channels == 'auto'
        or (isinstance(channels, Real) and not isinstance(channels, bool) and 0 < channels <= 1)
    ):
        if channels is not None and ffn:
            raise ConversionError(f'ffn={ffn:g} and channels={channels!r}: give one of them')
        return None if channels == 1 else channels
    raise ConversionError(f"channels={channels!r}: give the share of multiply-adds that stays, such as 0.5, or 'auto'")


def _check_absorbs(keep: int | Collection[str], plan: AbsorptionPlan, prunes: bool) -> None:
    """Raises ConversionError if ``keep`` leaves no LayerNorm to absorb and no hidden channel is removed."""
    found = [name for name, reason in plan.reasons.items() if not reason]
    if isinstance(keep, Integral) and keep >= len(found) > 0:
        raise ConversionError(
            f'keep={keep}: {len(found)} LayerNorms can be absorbed, so give a number from 0 to {len(found) - 1}'
            + (", or keep='all'" if prunes else '')
        )
    if not isinstance(keep, (Integral, str)) and not prunes and {*found} <= {*keep}:
        raise ConversionError(f'keep= names all {len(found)} LayerNorms that can be absorbed; name fewer')


def _compare_to(teacher: nn.Module, images: Images) -> Callable[[nn.Module], None] | None:
    """Returns a function that adds a student's retained AP to its report; None if detections cannot be compared."""
    # mmdet pastes masks only in float32.
    if not hasattr(teacher, 'data_preprocessor') or next(teacher.parameters()).dtype == torch.float64:
        return None
    try:
        reference = detect(teacher, images.held_out)
    except ComparisonError:
        return None
    truth = detect(teacher, images.held_out, mirrored=True)

    def compare(student: nn.Module) -> None:
        report = student.absorption_report
        report.held_out = images.count >= HELD_OUT
        report.num_images, report.num_detections = len(reference), sum(len(found.scores) for found in reference)
        with suppress(ComparisonError):  # the teacher finds nothing
            found = retained_ap(truth, reference, detect(student, images.held_out))
            report.retained_ap, report.retained_ap_error = found

    return compare


def find_least_share(
    survey: Survey,
    plan: AbsorptionPlan,
    make: Callable[..., nn.Module],
    compare: Callable[[nn.Module], None],
    progress: bool,
) -> float:
    """Returns the least share of multiply-adds with which a student retains the teacher's AP, found by bisection.

    Args:
        survey: Chooses the channels for a share.
        plan: The plan of the students, whose norms all stay.
        make: Makes a student that keeps the named norms and ``channels``.
        compare: Adds a student's retained AP to its report.
        progress: Print the retained AP of each student.

    Raises:
        ConversionError: If the teacher finds nothing.
    """
    norms = [name for name, reason in plan.reasons.items() if not reason]
    # Shares of 1 / 32. Invariant: no channel has to go for ``high``, and a student with ``high`` retains enough.
    low, high = math.ceil(32 * survey.least_share()) - 1, 32
    while high - low > 1:
        middle = (low + high) // 2
        student = make(norms, channels=survey.choose(middle / 32))
        compare(student)
        found = student.absorption_report.retained_ap
        if found is None:
            raise ConversionError(
                "channels='auto': the teacher finds nothing in the held-out images, so nothing shows what a student "
                'loses; give images of its objects, or channels=0.5'
            )
        if progress:
            print(f'{middle / 32:.2f} of the multiply-adds left: {found:.1%} of the AP retained')
        low, high = (low, middle) if found >= LEAST_RETAINED_AP else (middle, high)
    return high / 32


def absorb_until_agreement(
    make: Callable[[Collection[str]], nn.Module], compare: Callable[[nn.Module], None], progress: bool
) -> nn.Module:
    """Returns the student that keeps the fewest norms and agrees with the teacher, found by bisection up to a quarter.

    Args:
        make: Makes a student that keeps the named norms.
        compare: Adds a student's agreement to its report.
        progress: Print the agreement of each student.
    """
    ranked: list[str] = []

    def attempt(count: int) -> nn.Module:
        student = make(ranked[:count])
        compare(student)
        if not ranked:
            ranked.extend(student.absorption_report.rank())
        if progress:
            found = student.absorption_report.retained_ap
            value = 'undefined' if found is None else f'{found:.1%}'
            print(f'{count} of {len(ranked)} LayerNorms kept: retained {value}')
        return student

    def agrees(student: nn.Module) -> bool:
        return student.absorption_report.retained_ap >= LEAST_RETAINED_AP

    best = attempt(0)
    low, high = 0, len(ranked) // 4
    if high == 0:
        return best
    if best.absorption_report.retained_ap is None:
        return attempt(high)
    if agrees(best):
        return best
    best = max(best, attempt(high), key=lambda student: student.absorption_report.retained_ap)
    # Invariant: the student with ``low`` norms does not agree, the student with ``high`` norms does.
    while agrees(best) and high - low > 1:
        middle = (low + high) // 2
        student = attempt(middle)
        if agrees(student):
            best, high = student, middle
        else:
            low = middle
    return best


def _warn(report: AbsorptionReport) -> None:
    warn = MMLogger.get_current_instance().warning
    if report.channels and not report.pruned:
        warn(f'no hidden channel was removed: {report.channels[0].reason}')
    elif report.multiply_adds and not report.pruned:
        warn(
            f'no hidden channel was removed: no student with fewer retains {LEAST_RETAINED_AP:.0%} of the AP; give a '
            'number, such as channels=0.9'
        )
    if report.num_images and report.retained_ap is None:
        warn(
            f'the teacher finds nothing in {report.num_images} images: {len(report.kept)} LayerNorms are '
            'kept, and the loss of AP is unknown; give images of its objects, or keep=K'
        )
    elif report.retained_ap is not None and report.retained_ap < LEAST_RETAINED_AP:
        remedies = ['remove fewer hidden channels'] if report.pruned else []
        remedies += ['keep more norms (keep=K)'] if len(report.kept) < len(report.norms) else []
        remedies.append('train towards the teacher (slab_det.conversion.write_tune_config)')
        warn(
            f'{report.retained_ap:.1%} of the AP are retained, less than {LEAST_RETAINED_AP:.0%}, with '
            f'{len(report.kept)} LayerNorms kept; {report.describe_loss()}; {" or ".join(remedies)}'
        )
