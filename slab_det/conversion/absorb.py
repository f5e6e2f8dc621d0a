"""absorb: the LayerNorms of a trained detector go into its linear layers, without training and without labels."""

from __future__ import annotations

import copy
import hashlib
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.runner import save_checkpoint
from mmengine.utils import ProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slab_det.conversion.convert import ConversionError, reason_to_keep
from slab_det.conversion.regression import CrossMoments, choose_fit, diagonal_fit
from slab_det.conversion.walk import Probe, Walk, last_uses, load_tensors, register_probe
from slab_det.fusion.folds import Write, find_hooks, find_rule
from slab_det.fusion.fuse import (
    apply_fold,
    check_fusible,
    containers_of,
    fold_affine,
    join_names,
    plan_folds,
    replace_module,
)
from slab_det.fusion.report import FusionReport
from slab_det.measure.agreement import NO_LOSS, agreement, detect
from slab_det.norms import named_offline_norms
from slab_det.recalibration.moments import Moments, evaluating, prepare_inputs
from slab_det.runtime import read_checkpoint

# Every so many batches one is held out: it chooses ridges and measures what is left.
HELD_OUT = 5


@dataclass(frozen=True)
class NormAbsorption:
    """What became of one LayerNorm.

    Attributes:
        norm: Its dotted name.
        fate: 'absorbed' or 'kept'.
        into: The layers that hold it now, separated by commas, or ''.
        reason: Why it was kept, or ''.
        own: Share of the norm's variance that the best map of the teacher's input leaves: what of this norm is not
            affine. Shares are of held-out batches, over tokens and channels; None where nothing was measured.
        diagonal: Share that the best scale per channel leaves of the student's input, centred.
        left: Share that the map that was folded leaves of the student's input; what is more than ``own`` comes from the
            norms before.
        ridge: Strength of the pull to the diagonal map.
        within: Standard deviation of 1 / sigma over the tokens of an image, over its mean.
        between: Standard deviation of the images' mean 1 / sigma, over its mean.
    """

    norm: str
    fate: Literal['absorbed', 'kept']
    into: str = ''
    reason: str = ''
    own: float | None = None
    diagonal: float | None = None
    left: float | None = None
    ridge: float | None = None
    within: float | None = None
    between: float | None = None


@dataclass(frozen=True)
class StreamRefit:
    """How far the residual stream was from the teacher's before and after the layer that writes it was fitted.

    Attributes:
        layer: Its dotted name.
        before: Mean squared distance over the variance of the teacher's stream, on held-out batches.
        after: The same with the fitted layer.
        ridge: Strength of the pull to the old weights.
    """

    layer: str
    before: float
    after: float
    ridge: float


@dataclass
class AbsorptionReport:
    """What :func:`absorb` did.

    Attributes:
        norms: The LayerNorms, in the order of their calls; those that are never called last.
        writers: The layers of the residual stream that were fitted, in the order of their calls.
        agreement: With the teacher on held-out images, where it decided how many norms were kept.
    """

    norms: list[NormAbsorption] = field(default_factory=list)
    writers: list[StreamRefit] = field(default_factory=list)
    agreement: float | None = None

    @property
    def kept(self) -> list[NormAbsorption]:
        """The norms that stayed."""
        return [norm for norm in self.norms if norm.fate == 'kept']

    def rank(self) -> list[str]:
        """The norms that were fitted, the least affine first."""
        return [norm.norm for norm in sorted(self.norms, key=lambda norm: -(norm.own or 0)) if norm.own is not None]

    def to_dict(self) -> dict:
        """The attributes, as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> AbsorptionReport:
        """The inverse of :meth:`to_dict`."""
        norms = [NormAbsorption(**norm) for norm in values['norms']]
        return cls(norms, [StreamRefit(**writer) for writer in values['writers']], values['agreement'])

    def __str__(self) -> str:
        absorbed = [norm for norm in self.norms if norm.fate == 'absorbed']
        lines = [f'{len(absorbed)} LayerNorms absorbed, {len(self.kept)} kept']
        lines += [f'  {norm.norm}: kept, {norm.reason}' for norm in self.kept]
        if absorbed:
            worst = max(absorbed, key=lambda norm: norm.left)
            lines.append(
                f'  left of their variance: {sum(norm.left for norm in absorbed) / len(absorbed):.1%} on average, most '
                f'at {worst.norm}: {worst.left:.1%}, of which {worst.own:.1%} is its own '
                f'(a scale per channel leaves {worst.diagonal:.1%})'
            )
        return '\n'.join(lines)


def absorb(
    model: nn.Module,
    images: Iterable,
    keep: int | float | str | Collection[str] | None = None,
    least: float = NO_LOSS,
    fold_outputs: bool = False,
    work_dir: str | Path | None = None,
    progress: bool = True,
) -> nn.Module:
    """Replaces the LayerNorms of a trained model by affine maps that its linear layers take, without training.

    Front to back, the teacher, ``model``, beside the student, what is absorbed so far. For each LayerNorm the ridge
    regression of the teacher's output y on the student's input x,

        M, t = argmin  E |y - M x - t|^2 + r |(M - D) diag(sigma)|^2,

    goes into the layers that read the norm: ``W y + b`` becomes ``(W M) x + (b + W t)``. D is the calibrated diagonal
    fold, the best scale per channel of the centred input. Behind each attention and each FFN the layer that writes the
    residual stream is fitted in the same way, so that the student's stream meets the teacher's. The ridges r are chosen
    on every fifth batch, which the fits do not see.

    The result has no norm where one was absorbed: it is fused already. ``absorption_report`` says what each norm left,
    ``fusion_report`` where it went.

    Args:
        model: A detector or a backbone with LayerNorm: ours or mmdet's Swin, PVT or PVTv2, or any for which
            :func:`slab_det.fusion.register_folds` names the readers of the norms.
        images: Unlabelled: what a data loader yields, or image tensors (B, 3, H, W); about a hundred images, of the
            kind that the detector will see.
        keep: Norms that stay LayerNorm: a number K, the K that are the least affine; a float, all of which a larger
            share is not affine (:attr:`NormAbsorption.own`); their names, or one; or None, as few as it takes for an
            agreement with the teacher of ``least`` on the held-out images: none, or else as many of the least affine
            ones as bisection finds, up to half of them. The best is taken where none agrees so well.
        least: See ``keep``; a detector's :func:`slab_det.measure.agreement.agreement`.
        fold_outputs: See :func:`slab_det.fuse`.
        work_dir: A folder for what is finished; a later call with the same arguments and images goes on from there.
        progress: Show a progress bar.

    Returns:
        The fused student, in eval mode; ``model`` is left as it is.

    Raises:
        ConversionError: If no LayerNorm can be absorbed, there are no images, ``keep`` names no such norm or is below
            0, an attention has hooks, or values are not finite.
        FusionError: If the model has norms of ours that cannot be fused.
    """
    if is_model_wrapper(model):
        raise ConversionError(f'the model is wrapped in a {type(model).__name__}; give what is inside, model.module')
    if isinstance(keep, Real) and not keep >= 0:
        raise ConversionError(f'keep={keep}: give a number from 0 on, or names of LayerNorms')
    if isinstance(keep, str):
        keep = (keep,)
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='slab_det_absorb_')))
        held_out = HeldOut(images) if keep is None else None
        plan = AbsorptionPlan(model, images, folder, fold_outputs, held_out)
        run = partial(_Run, plan, work_dir=work_dir and Path(work_dir), progress=progress)
        if isinstance(keep, Real) and not isinstance(keep, Integral):
            return run(bound=float(keep)).student
        if isinstance(keep, Integral):
            keep = run().student.absorption_report.rank()[:keep] if keep else ()
        if keep is not None:
            return run(names=keep).student
        return _absorb_until_agreement(model, held_out, run, least, progress)


def _absorb_until_agreement(
    model: nn.Module, images: HeldOut, run: Callable[..., _Run], least: float, progress: bool
) -> nn.Module:
    if not hasattr(model, 'data_preprocessor'):
        raise ConversionError(
            'keep=None compares detections, and the model is no detector; give a number, keep=0 for one'
        )
    reference = detect(model, images)
    ranked: list[str] = []
    students: dict[int, nn.Module] = {}
    # Fewer do not agree; so many do.
    low, high, count = -1, None, 0
    while count not in students:
        student = students[count] = run(names=ranked[:count]).student
        report = student.absorption_report
        report.agreement = agreement(reference, detect(student, images))
        ranked = ranked or report.rank()
        if progress:
            print(f'{count} of {len(ranked)} LayerNorms kept: agreement {report.agreement:.3f}')
        if report.agreement >= least:
            high = count
        else:
            low = count
        if high is None:
            count = len(ranked) // 4 if count == 0 else len(ranked) // 2
        else:
            count = (low + high + 1) // 2
    best = students[high] if high is not None else max(students.values(), key=lambda s: s.absorption_report.agreement)
    report = best.absorption_report
    if report.agreement < least:
        MMLogger.get_current_instance().warning(
            f'agreement with the teacher is {report.agreement:.3f} at best, below {least:g}, with {len(report.kept)} '
            'LayerNorms kept: expect a loss of AP; keep more (keep=K) or train towards the teacher '
            '(slab_det.conversion.tune)'
        )
    return best


def held_out_step(images: Sequence | DataLoader) -> int:
    """Every so many batches :func:`absorb` holds one out; 1 where there are too few batches for that."""
    return HELD_OUT if len(images) >= HELD_OUT else 1


class HeldOut(list):
    """The batches that :func:`absorb` holds out, of one pass over ``images``: another pass may draw other images.

    Attributes:
        dataset: That of a data loader, or None; it says how batches are prepared.
    """

    def __init__(self, images: Iterable) -> None:
        super().__init__()
        self.dataset = getattr(images, 'dataset', None)

    def offer(self, index: int, batch: object) -> None:
        """Takes a batch if it is held out; all where there are too few batches for that."""
        if index == HELD_OUT - 1:
            self.clear()
        if index < HELD_OUT or index % HELD_OUT == HELD_OUT - 1:
            self.append(batch)


class Writer(NamedTuple):
    """A layer that writes the residual stream, where the new stream is seen, and what the layer reads."""

    layer: str
    stream: Probe
    source: Probe


class AbsorptionPlan:
    """What is fitted, in which order, and the images: all that does not depend on the norms to keep.

    Attributes:
        model: The teacher.
        images: One file for each batch, with its image tensor (B, 3, H, W).
        digest: Of the images, the teacher's weights and the fates.
        fates: Where each norm goes if it is absorbed, by its name.
        reasons: Why each LayerNorm has to stay, or '', by its name.
        units: Names of the modules that hold the norms, in the order of their calls.
        steps: For each unit the norms, by name, and writers to fit, in the order of their calls.
        last_uses: See :class:`slab_det.conversion.walk.Walk`.
        folder: For temporary files.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Iterable,
        folder: Path,
        fold_outputs: bool = False,
        held_out: HeldOut | None = None,
    ) -> None:
        self.model, self.folder = model, folder
        self.images = []
        self.digest = hashlib.sha256()
        prepare = prepare_inputs(model, images)
        for index, batch in enumerate(images):
            self.images.append(folder / f'image_{index}.pt')
            inputs = prepare(batch)[0].clone()
            torch.save(inputs, self.images[-1])
            self.digest.update(_to_bytes(inputs))
            if held_out is not None:
                held_out.offer(index, batch)
        if not self.images:
            raise ConversionError('there was no batch of images; check the dataset and its filter_cfg')
        check_fusible(model)
        for name, module in model.named_modules():
            if find_rule(module, 'replace') and any(map(find_hooks, module.modules())):
                raise ConversionError(f'{name}: it has hooks, which would be lost; remove them before slab_det.absorb')
        # Norms of neck and heads are not on the way.
        self.root = 'backbone.' if isinstance(getattr(model, 'backbone', None), nn.Module) else ''
        image = load_tensors(self.images[0], next(model.parameters()).device)
        writers = {writer.layer: writer for writer in self._find_writers()}
        reasons = self._find_reasons()
        calls = self._trace(image, {writer.layer: writer.stream for writer in writers.values()}, reasons)
        for name in reasons:
            if not reasons[name] and calls.count(name) != 1:
                reasons[name] = f'a forward calls it {calls.count(name)} times'
        candidates = {model.get_submodule(name) for name, reason in reasons.items() if not reason}
        self.fates = {fate.norm: fate for fate in plan_folds(model, fold_outputs, candidates)}
        self.digest.update(repr(self.fates).encode())
        for name, value in model.state_dict().items():
            self.digest.update(name.encode() + _to_bytes(value))
        self.reasons = {name: reason or self.fates[name].reason for name, reason in reasons.items()}
        if all(self.reasons.values()):
            kept = '; '.join(f'{name}: {reason}' for name, reason in self.reasons.items())
            raise ConversionError(f'the model has no LayerNorm that can be absorbed{kept and f" ({kept})"}')
        # A module that a forward calls twice has more than one stream.
        steps = [name for name in calls if calls.count(name) == 1 and (name in writers or not self.reasons[name])]
        owners = {step: self._find_unit(step) for step in steps}
        self.units = list(dict.fromkeys(owners.values()))
        self.steps = [[writers.get(s, s) for s in steps if owners[s] == unit] for unit in self.units]
        self.last_uses = last_uses(model, self.forward(model), self.units, image)

    def _find_reasons(self) -> dict[str, str]:
        """Why each LayerNorm of the model has to stay, or ''."""
        inner = {part for _, norm in named_offline_norms(self.model) for part in norm.modules()}
        reasons = {}
        for name, norm in self.model.named_modules():
            if isinstance(norm, nn.LayerNorm) and norm not in inner:
                reason = reason_to_keep(name, norm, self.model.get_submodule(name.rpartition('.')[0]))
                if not name.startswith(self.root):
                    reason = 'it is not in the backbone'
                elif hooks := find_hooks(norm):
                    reason = f'it has {hooks}'
                reasons[name] = reason or ''
        return reasons

    def _find_writers(self) -> list[Writer]:
        writers: list[Writer] = []
        for prefix, module in self.model.named_modules():
            rule = find_rule(module, 'writes')
            # A block speaks for its FFN.
            if rule and not any(writer.layer.startswith(f'{prefix}.') for writer in writers):
                for write in rule():
                    layer, stream, source = (name and join_names(prefix, name) for name in Write(*write))
                    writers.append(
                        Writer(
                            layer,
                            Probe(stream, 'input') if stream else Probe(prefix, 'output'),
                            Probe(source, 'output') if source else Probe(layer, 'input'),
                        )
                    )
        return writers

    def _trace(self, image: Tensor, probes: dict[str, Probe], norms: Iterable[str]) -> list[str]:
        """The names of the writers and norms in the order in which a forward comes to them."""
        calls: list[str] = []
        # Where the new stream is the input of a norm, the writer is first.
        places = [*probes.items(), *((name, Probe(name, 'input')) for name in norms)]
        with ExitStack() as stack, torch.no_grad():
            for name, probe in places:
                module = self.model.get_submodule(probe.module)
                stack.callback(register_probe(module, probe.side, lambda value, name=name: calls.append(name)).remove)
            self.forward(self.model)(image)
        return calls

    def _find_unit(self, name: str) -> str:
        """The outermost module around a norm or layer, backbones excepted, that says where norms go or what writes."""
        for container in ['', *containers_of(name)]:
            module = self.model.get_submodule(container)
            if find_rule(module, 'output_folds') is None and (
                find_rule(module, 'folds') or find_rule(module, 'writes')
            ):
                return container
        return name

    def forward(self, model: nn.Module) -> Callable[[Tensor], object]:
        """What runs a teacher or student on an image tensor."""
        return model.backbone if self.root else model


class _Run:
    """One student: every norm is absorbed but those named, and those of which more than ``bound`` is not affine."""

    def __init__(
        self,
        plan: AbsorptionPlan,
        names: Collection[str] = (),
        bound: float = math.inf,
        work_dir: Path | None = None,
        progress: bool = True,
    ) -> None:
        if unknown := {*names} - {name for name, reason in plan.reasons.items() if not reason}:
            known = ', '.join(name for name, reason in plan.reasons.items() if not reason)
            raise ConversionError(f'keep: {", ".join(sorted(unknown))} cannot be absorbed anyhow; these can: {known}')
        self.plan, self.names, self.bound = plan, {*names}, bound
        self.report = AbsorptionReport()
        self.student = copy.deepcopy(plan.model)
        # Modules that show what their layers read.
        for name, module in list(self.student.named_modules()):
            if make := find_rule(module, 'replace'):
                replace_module(self.student, name, make())
        for fate in plan.fates.values():
            if fate.fate != 'absorbed':
                apply_fold(self.student, fate)
        self.state_file = work_dir and work_dir / f'absorb_{self._key()}.pth'
        first = self._resume()
        self.bar = None
        if progress and first < len(plan.units):
            print(f'Absorption, {len(plan.units) - first} of {len(plan.units)} units')
            self.bar = ProgressBar(sum(len(steps) + 1 for steps in plan.steps[first:]) * len(plan.images))
        with tempfile.TemporaryDirectory(dir=plan.folder) as folder:
            self.teacher_walk, self.student_walk = (
                Walk(model, plan.forward(model), plan.units, plan.last_uses, plan.images, Path(folder, name))
                for name, model in (('teacher', plan.model), ('student', self.student))
            )
            if 0 < first < len(plan.units):
                self._run_units(first - 1, live_from=0)
            for unit in range(first, len(plan.units)):
                self._fit_unit(unit)
                self._save(unit + 1)
        if self.bar:
            print()
        kept = {norm.norm for norm in self.report.kept}
        fates = [
            replace(f, fate='kept', into='', reason='kept by choice') if f.norm in kept else f
            for f in plan.fates.values()
        ]
        self.report.norms += [NormAbsorption(n, 'kept', reason=reason) for n, reason in plan.reasons.items() if reason]
        self.student.absorption_report, self.student.fusion_report = self.report, FusionReport(fates)

    def _fit_unit(self, unit: int) -> None:
        for step in self.plan.steps[unit]:
            if not isinstance(step, Writer):
                self.report.norms.append(self._absorb_norm(unit, step))
            elif any(norm.fate == 'absorbed' for norm in self.report.norms):
                self.report.writers.append(self._fit_writer(unit, step))
        self._run_units(unit, live_from=unit)
        for walk in (self.teacher_walk, self.student_walk):
            walk.drop_before(unit + 1)

    def _run_units(self, unit: int, live_from: int) -> None:
        """Stores what the units up to this one return."""
        for batch in range(len(self.plan.images)):
            for walk in (self.teacher_walk, self.student_walk):
                walk.run(batch, unit, (), live_from, store=True)
            if self.bar and live_from == unit:
                self.bar.update()

    def _is_held_out(self, batch: int) -> bool:
        return batch % HELD_OUT == HELD_OUT - 1

    def _collect(self, name: str, tokens: Callable[[int], tuple[Tensor, Tensor]]) -> tuple[CrossMoments, CrossMoments]:
        """Moments of inputs and targets that ``tokens`` gives of each batch: those to fit, and those held out."""
        moments = CrossMoments(), CrossMoments()
        for batch in range(len(self.plan.images)):
            moments[self._is_held_out(batch)].add(*tokens(batch))
            if self.bar:
                self.bar.update()
        if not all(part.count == 0 or (part.xx.isfinite().all() and part.yy.isfinite().all()) for part in moments):
            raise ConversionError(f'{name}: what it reads or writes is NaN or infinite; check weights and images')
        return moments

    def _absorb_norm(self, unit: int, name: str) -> NormAbsorption:
        eps = self.plan.model.get_submodule(name).eps
        means, variances = [], []
        own = CrossMoments(), CrossMoments()

        def tokens(batch: int) -> tuple[Tensor, Tensor]:
            source, target = self.teacher_walk.run(batch, unit, (Probe(name, 'input'), Probe(name, 'output')))
            scales = (source.double().var(-1, correction=0) + eps).rsqrt().reshape(len(source), -1)
            means.append(scales.mean(1))
            variances.append(scales.var(1, correction=0))
            own[self._is_held_out(batch)].add(source, target)
            return self.student_walk.run(batch, unit, (Probe(name, 'input'),))[0], target

        moments, held_out = self._collect(name, tokens)
        diagonal = diagonal_fit(moments)
        fit, ridge = choose_fit(moments, held_out, diagonal.matrix)
        judge = _judge(moments, held_out)
        own_fit, _ = choose_fit(*own, diagonal_fit(own[0]).matrix)
        mean = torch.cat(means).mean()
        result = NormAbsorption(
            name,
            'absorbed',
            self.plan.fates[name].into,
            own=_judge(*own).unexplained(own_fit),
            diagonal=judge.unexplained(diagonal),
            left=judge.unexplained(fit),
            ridge=ridge,
            within=float(torch.cat(variances).mean().sqrt() / mean),
            between=float(torch.cat(means).std(correction=0) / mean),
        )
        if name in self.names or result.own > self.bound:
            reason = 'by name' if name in self.names else f'no affine map holds {result.own:.1%} of it'
            return replace(result, fate='kept', into='', reason=reason)
        apply_fold(self.student, self.plan.fates[name])
        fold_affine(self.student, self.plan.fates[name], *fit)
        return result

    @torch.no_grad()
    def _fit_writer(self, unit: int, writer: Writer) -> StreamRefit:
        layer = self.student.get_submodule(writer.layer)
        energy = Moments()

        def tokens(batch: int) -> tuple[Tensor, Tensor]:
            (target,) = self.teacher_walk.run(batch, unit, (writer.stream,))
            source, stream = self.student_walk.run(batch, unit, (writer.source, writer.stream))
            if self._is_held_out(batch) or len(self.plan.images) < HELD_OUT:
                energy.add(target)
            if source.ndim == 4 and isinstance(layer, nn.Conv2d):
                source = source.flatten(2).transpose(1, 2)
            return source, target - stream

        moments, held_out = self._collect(writer.layer, tokens)
        if layer.bias is None:
            # The checkpoint of the student has no place for a shift.
            moments, held_out = moments.about_zero(), held_out.about_zero()
        prior = moments.xy.new_zeros(moments.xy.T.shape)
        fit, ridge = choose_fit(moments, held_out, prior)
        judge = _judge(moments, held_out)
        # A stream of one token per image may not vary.
        variance = max(float(energy.var.sum()), 1e-300)
        # What is left where nothing is fitted: the mean too.
        before = float(judge.yy.sum() / judge.count + judge.mean_y.square().sum()) / variance
        after = judge.unexplained(fit) * float(judge.yy.sum() / judge.count) / variance
        if after < before:
            layer.weight += fit.matrix.view_as(layer.weight)
            if layer.bias is not None:
                layer.bias += fit.shift
        return StreamRefit(writer.layer, before, min(before, after), ridge)

    def _key(self) -> str:
        """Tells runs apart: another teacher, other images or other norms to keep."""
        digest = self.plan.digest.copy()
        digest.update(repr((sorted(self.names), self.bound)).encode())
        return digest.hexdigest()[:16]

    def _save(self, unit: int) -> None:
        if self.state_file:
            self.state_file.parent.mkdir(parents=True, exist_ok=True)
            state = dict(unit=unit, weights=self.student.state_dict(), report=self.report.to_dict())
            # A file that was cut off while it was written must not be resumed from.
            part = self.state_file.with_suffix('.part')
            save_checkpoint(state, str(part))
            part.replace(self.state_file)

    def _resume(self) -> int:
        """Loads what an earlier run finished; returns the unit to go on from."""
        if not self.state_file or not self.state_file.exists():
            return 0
        state = read_checkpoint(self.state_file)
        self.report = AbsorptionReport.from_dict(state['report'])
        for norm in self.report.norms:
            if norm.fate == 'absorbed':
                apply_fold(self.student, self.plan.fates[norm.norm])
        self.student.load_state_dict(state['weights'])
        return state['unit']


def _judge(moments: CrossMoments, held_out: CrossMoments) -> CrossMoments:
    """The tokens that say what is left: those held out, or all where there are none."""
    return held_out if held_out.count else moments


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
