"""Makes one student of an absorption: fits and folds its norms block by block, with the teacher run in parallel."""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from slab_det.absorption.absorption_report import KEPT_BY_CHOICE, AbsorptionReport, FFNAbsorption, NormAbsorption
from slab_det.absorption.images import is_held_out
from slab_det.absorption.plan import AbsorptionPlan, Step
from slab_det.absorption.regression import CrossMoments, choose_fit, diagonal_fit, measured_part, rank_channels
from slab_det.absorption.walk import Walk
from slab_det.fusion.ffn_pruning import find_ffn_layers, prune_ffn
from slab_det.fusion.fuse import apply_fold, fold_affine, past_report
from slab_det.fusion.fusion_report import FusionReport
from slab_det.norms.folds import CannotFold
from slab_det.runtime import read_checkpoint
from slab_det.runtime.copying import copy_module
from slab_det.runtime.errors import ConversionError
from slab_det.runtime.progress import Progress
from slab_det.runtime.run_folder import AtomicLocalBackend

# Least number of positions of a map on which a convolution of the neck is fitted; the input at each is a patch.
POSITIONS = 4096


def absorb_norms(
    plan: AbsorptionPlan, names: Collection[str] = (), work_dir: Path | None = None, progress: bool = True
) -> nn.Module:
    """Makes a student that has absorbed every norm except ``names``.

    Args:
        plan: The steps and the images.
        names: Norms that stay LayerNorm.
        work_dir: Folder for finished blocks, from which a later call resumes; by default the folder of the plan.
        progress: Show a progress bar.

    Returns:
        The fused student, with its reports.

    Raises:
        ConversionError: If ``names`` has a name that is no absorbable norm, or values are not finite.
    """
    possible = [name for name, reason in plan.reasons.items() if not reason]
    if unknown := ', '.join(sorted({*names} - {*possible})):
        raise ConversionError(f'keep: {unknown} cannot be absorbed; these can: {", ".join(possible)}')
    model, blocks = _copy_teacher(plan), [*plan.blocks]
    absorption = Absorption(plan, model, {*names}, work_dir or plan.folder)
    first = absorption.resume()
    title = f'Absorption, {len(blocks) - first} of {len(blocks)} blocks'
    for block in Progress(blocks[first:], title, disable=not progress or first == len(blocks)):
        absorption.fit_block(block)
        absorption.save(block)
    report, past = absorption.report, past_report(plan.model)
    kept = {norm.norm for norm in report.kept}
    fusions = [
        replace(fusion, outcome='kept', into=(), reason=KEPT_BY_CHOICE) if fusion.norm in kept else fusion
        for fusion in plan.fusions.values()
    ]
    report.norms += [NormAbsorption(name, 'kept', reason=reason) for name, reason in plan.reasons.items() if reason]
    ffns = {ffn.ffn: ffn.hidden for ffn in report.pruned}
    model.absorption_report = report
    model.fusion_report = FusionReport([*past.norms, *fusions], past.ffns | ffns)
    return model


def _copy_teacher(plan: AbsorptionPlan) -> nn.Module:
    """A copy of the teacher with slab_det's own norms fused."""
    model = copy_module(plan.model)
    for fusion in plan.fusions.values():
        if fusion.outcome != 'absorbed':
            apply_fold(model, fusion)
    return model


class Absorption:
    """The state of an absorption: the student, its teacher, and the report of the blocks fitted so far.

    Args:
        plan: The steps and the images.
        model: The student before any fit.
        names: Norms that stay LayerNorm.
        work_dir: Folder for the weights that each block changed.

    Attributes:
        report: Report of the steps so far.
        saved: The student's weights when they were last saved or loaded.
    """

    def __init__(self, plan: AbsorptionPlan, model: nn.Module, names: set[str], work_dir: Path) -> None:
        self.plan, self.model, self.names, self.work_dir = plan, model, names, work_dir
        self.teacher, self.student = (
            Walk(net, plan.forward(net), plan.reads, plan.images.store, name)
            for name, net in (('teacher', plan.model), ('student', model))
        )
        self.report, self.saved = AbsorptionReport(), {}

    def file(self, block: str) -> Path:
        """The file of a finished block, shared by students that keep the same norms up to this block."""
        blocks = [*self.plan.blocks]
        fitted = {step.name for name in blocks[: blocks.index(block) + 1] for step in self.plan.blocks[name]}
        digest = self.plan.digest.copy()
        digest.update(repr((block, sorted(self.names & fitted))).encode())
        return self.work_dir / f'absorb_{digest.hexdigest()[:16]}.pth'

    def save(self, block: str) -> None:
        """Saves the weights that a block changed and the report so far."""
        changed = {
            name: value.clone()
            for name, value in self.model.state_dict().items()
            if name not in self.saved or not torch.equal(value, self.saved[name])
        }
        self.saved.update(changed)
        buffer = io.BytesIO()
        torch.save(dict(weights=changed, report=self.report.to_dict()), buffer)
        AtomicLocalBackend().put(buffer.getvalue(), self.file(block))

    def resume(self) -> int:
        """Loads the blocks that earlier calls saved, and returns their number."""
        files = [*takewhile(Path.exists, map(self.file, self.plan.blocks))]
        weights: dict[str, Tensor] = {}
        for file in files:
            state = read_checkpoint(file)
            weights.update(state['weights'])
        if files:
            self.report = AbsorptionReport.from_dict(state['report'])
            for norm in self.report.norms:
                if norm.outcome == 'absorbed':
                    apply_fold(self.model, self.plan.fusions[norm.norm])
            for ffn in self.report.pruned:
                prune_ffn(self.model.get_submodule(ffn.ffn), torch.arange(ffn.hidden))
            self.model.load_state_dict({**self.model.state_dict(), **weights})
        self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        blocks = [*self.plan.blocks][: len(files)]
        for batch in self.batches() if 0 < len(files) < len(self.plan.blocks) else ():
            for block in blocks:
                self.teacher.run(batch, block, finish=block)
                self.student.run(batch, block, finish=block)
        return len(files)

    def batches(self) -> Iterator[int]:
        """Yields the indices of all batches."""
        _release_memory()
        yield from range(self.plan.images.count)

    def fit_block(self, block: str) -> None:
        """Fits the norms and layers of a block, in the order of the forward."""
        is_read = any(block in names for names in self.plan.reads.values())
        for step in self.plan.blocks[block]:
            # The modules that teacher and student finish during the fit, which saves a run after it. No fit changes the
            # teacher's output. The student's output is not final before the fit, so the student finishes a block only
            # if no other block reads its values: then the shape of the output is enough.
            early = step.finishes, '' if is_read or step.finishes != block else block
            if step.name in self.plan.fusions:
                self._absorb_norm(block, step, early)
            elif (hidden := self._count_hidden(step)) is not None or self._differs_from_teacher():
                self._fit_writer(block, step, hidden, early)
            else:
                early = '', ''
            both = zip((self.teacher, self.student), early, strict=True)
            walks = [walk for walk, finished in both if finished != step.finishes]
            for batch in self.batches() if walks else ():
                for walk in walks:
                    walk.run(batch, block, finish=step.finishes)

    def _differs_from_teacher(self) -> bool:
        """Whether the student already differs from the teacher, so that a writer has something to correct."""
        return bool(self.report.pruned) or any(norm.outcome == 'absorbed' for norm in self.report.norms)

    def _absorb_norm(self, block: str, step: Step, early: tuple[str, str]) -> None:
        name, fusion, own = step.name, self.plan.fusions[step.name], self.plan.own
        moments, own_moments = _empty_moments(self.plan.int8), _empty_moments()
        for batch in self.batches():
            part = is_held_out(batch)
            source, target = self.teacher.run(batch, block, [step.source, step.target], early[0])
            if name not in own:
                own_moments[part].add(source, target)
            moments[part].add(*self.student.run(batch, block, [step.source], early[1]), target)
            # Frees the memory for the next forwards.
            del source, target
        _check_finite(name, *moments)
        fit = choose_fit(*moments, diagonal_fit(moments[0]).matrix)
        if name not in own:
            own[name] = measured_part(*own_moments).unexplained(
                choose_fit(*own_moments, diagonal_fit(own_moments[0]).matrix)
            )
        shares = dict(own=own[name], left=measured_part(*moments).unexplained(fit))
        if name in self.names:
            reason = f'the best affine map has an error of {own[name]:.1%}'
            self.report.norms.append(NormAbsorption(name, 'kept', reason=reason, **shares))
        else:
            self.report.norms.append(NormAbsorption(name, 'absorbed', **shares))
            apply_fold(self.model, fusion)
            fold_affine(self.model, fusion, *fit)

    def _count_hidden(self, step: Step) -> int | None:
        """The number of hidden channels, a multiple of 8, to leave in the FFN of a layer; None if it is not pruned."""
        if not (self.plan.ffn and step.ffn):
            return None
        try:
            channels = len(find_ffn_layers(self.model.get_submodule(step.ffn))[0].weight)
            hidden = 8 * max(1, math.ceil((1 - self.plan.ffn) * channels / 8 - 1e-9))
            if hidden >= channels:
                raise CannotFold('it has too few hidden channels')
        except CannotFold as reason:
            self.report.ffns.append(FFNAbsorption(step.ffn, reason=str(reason)))
            return None
        return hidden

    def _fit_writer(self, block: str, step: Step, hidden: int | None, early: tuple[str, str]) -> None:
        """Fits a layer so that the student's stream approaches the teacher's; with ``hidden``, prunes its FFN too."""
        layer, moments = self.model.get_submodule(step.name), _empty_moments(self.plan.int8)
        for batch in self.batches():
            (target,) = self.teacher.run(batch, block, [step.target], early[0])
            source, stream = self.student.run(batch, block, [step.source, step.target], early[1])
            if isinstance(layer, nn.Conv2d) and source.ndim == 4:
                if target.ndim == 4:
                    source, stream, target = _patches(layer, source, stream), _sample_rows(stream), _sample_rows(target)
                else:
                    # A convolution in an FFN has kernel 1 and writes tokens.
                    source = source.flatten(2).transpose(1, 2)
            moments[is_held_out(batch)].add(source, target - stream)
            del source, stream, target
        _check_finite(step.name, *moments)
        if hidden is None:
            self.report.refits[step.name] = _refit(layer, *moments)
        else:
            self.report.ffns.append(_prune(step.ffn, self.model.get_submodule(step.ffn), hidden, *moments))


@torch.no_grad()
def _refit(layer: nn.Linear | nn.Conv2d, moments: CrossMoments, held_out: CrossMoments) -> float:
    """Adds to a layer the fit of the stream's error, the target of the moments, on the layer's input.

    Returns the mean squared error after the fit over the mean squared error before.
    """
    if layer.bias is None:
        # A model rebuilt from its config would have no bias here, so the fit has no shift.
        moments, held_out = moments.about_zero(), held_out.about_zero()
    fit = choose_fit(moments, held_out, torch.zeros_like(moments.xy.T))
    judge = measured_part(moments, held_out)
    before, after = judge.mean_square(), judge.unexplained(fit) * judge.variance()
    if after >= before:
        return 1.0
    layer.weight += fit.matrix.view_as(layer.weight)
    if layer.bias is not None:
        layer.bias += fit.shift
    return after / before


@torch.no_grad()
def _prune(name: str, ffn: nn.Module, hidden: int, moments: CrossMoments, held_out: CrossMoments) -> FFNAbsorption:
    """Removes hidden channels, the inputs of the moments, from an FFN, and refits its second layer."""
    _, _, fc2 = find_ffn_layers(ffn)
    weight = fc2.weight.flatten(1)
    for part in {moments, measured_part(moments, held_out)}:
        # The target becomes the whole output that the FFN should have, not only the error of the unpruned FFN.
        part.add_to_target(weight, fc2.bias)
    stay = rank_channels(moments)[-hidden:].sort().values
    moments, held_out = moments.select(stay), held_out.select(stay)
    fit = choose_fit(moments, held_out, weight[:, stay].double())
    prune_ffn(ffn, stay)
    fc2.weight.copy_(fit.matrix.view_as(fc2.weight))
    fc2.bias.copy_(fit.shift)
    return FFNAbsorption(name, len(weight[0]), hidden, left=measured_part(moments, held_out).unexplained(fit))


def _release_memory() -> None:
    """Returns freed memory to the system: glibc keeps as much as is in use, in pieces that fit no later step."""
    if trim := getattr(ctypes.CDLL(None), 'malloc_trim', None):
        trim(0)


def _row_step(output: Tensor) -> int:
    return max(1, output.shape[-2] * output.shape[-1] // POSITIONS)


def _sample_rows(output: Tensor) -> Tensor:
    """Every n-th row of a map, n from ``_row_step``, as tokens (B, N, C_out)."""
    return output[:, :, :: _row_step(output)].flatten(2).transpose(1, 2).clone()


def _patches(conv: nn.Conv2d, source: Tensor, output: Tensor) -> Tensor:
    """The input patches of a convolution for the rows of :func:`_sample_rows`, (B, N, C_in k k)."""
    stride = conv.stride[0] * _row_step(output), conv.stride[1]
    return nn.functional.unfold(source, conv.kernel_size, conv.dilation, conv.padding, stride).transpose(1, 2)


def _empty_moments(int8: bool = False) -> tuple[CrossMoments, CrossMoments]:
    """Empty moments for the batches to fit, and for the held-out batches."""
    return CrossMoments(int8), CrossMoments(int8)


def _check_finite(name: str, *parts: CrossMoments) -> None:
    if not all(part.count == 0 or (part.xx.isfinite().all() and part.yy.isfinite().all()) for part in parts):
        raise ConversionError(f'{name}: its input or output is NaN or infinite; check weights and images')
