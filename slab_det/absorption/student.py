"""One student of an absorption: block by block, beside the teacher, its norms go into its linear layers."""

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

from slab_det.absorption.images import is_held_out
from slab_det.absorption.plan import AbsorptionPlan, Step
from slab_det.absorption.regression import CrossMoments, choose_fit, diagonal_fit, measured_part, rank_channels
from slab_det.absorption.report import AbsorptionReport, FFNAbsorption, NormAbsorption
from slab_det.absorption.walk import Walk
from slab_det.fusion.ffn_pruning import find_ffn_layers, prune_ffn
from slab_det.fusion.folds import CannotFold, find_rule
from slab_det.fusion.fuse import apply_fold, fold_affine, past_report, replace_module
from slab_det.fusion.report import FusionReport
from slab_det.norms import copy_module
from slab_det.runtime import read_checkpoint
from slab_det.runtime.errors import ConversionError
from slab_det.runtime.progress import Progress
from slab_det.runtime.run_folder import AtomicLocalBackend

# Positions of a map, at least, at which a convolution of the neck is fitted: one input there is a whole patch.
POSITIONS = 4096


def absorb_norms(
    plan: AbsorptionPlan, names: Collection[str] = (), work_dir: Path | None = None, progress: bool = True
) -> nn.Module:
    """Makes a student that has absorbed every norm but those named.

    Args:
        plan: What is fitted, on which images.
        names: Norms that stay.
        work_dir: A folder for finished blocks, from which another call goes on; by default the folder of the plan.
        progress: Show a progress bar.

    Returns:
        The fused student, with its reports.

    Raises:
        ConversionError: If ``names`` holds no such norm, or values are not finite.
    """
    possible = [name for name, reason in plan.reasons.items() if not reason]
    if unknown := ', '.join(sorted({*names} - {*possible})):
        raise ConversionError(f'keep: {unknown} cannot be absorbed anyhow; these can: {", ".join(possible)}')
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
        replace(fusion, outcome='kept', into='', reason='kept by choice') if fusion.norm in kept else fusion
        for fusion in plan.fusions.values()
    ]
    report.norms += [NormAbsorption(name, 'kept', reason=reason) for name, reason in plan.reasons.items() if reason]
    ffns = {ffn.ffn: ffn.hidden for ffn in report.pruned}
    model.absorption_report = report
    model.fusion_report = FusionReport([*past.norms, *fusions], past.ffns | ffns)
    return model


def _copy_teacher(plan: AbsorptionPlan) -> nn.Module:
    """A student at its start: modules show what their layers read, and norms of ours are fused."""
    model = copy_module(plan.model)
    for name, module in list(model.named_modules()):
        if make := find_rule(module, 'replace'):
            replace_module(model, name, make())
    for fusion in plan.fusions.values():
        if fusion.outcome != 'absorbed':
            apply_fold(model, fusion)
    return model


class Absorption:
    """A student on its way through the blocks, beside its teacher.

    Args:
        plan: What is fitted, on which images.
        model: The student, at its start.
        names: Norms that stay.
        work_dir: Gets the weights that each block changed.

    Attributes:
        report: What was fitted so far.
        saved: The student's weights when it was last saved or loaded.
    """

    def __init__(self, plan: AbsorptionPlan, model: nn.Module, names: set[str], work_dir: Path) -> None:
        self.plan, self.model, self.names, self.work_dir = plan, model, names, work_dir
        self.teacher, self.student = (
            Walk(net, plan.forward(net), plan.reads, plan.images.store, name)
            for name, net in (('teacher', plan.model), ('student', model))
        )
        self.report, self.saved = AbsorptionReport(), {}

    def file(self, block: str) -> Path:
        """The file of a block: students share it if they have kept the same norms so far."""
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
        """Goes on from what other calls saved; returns the number of finished blocks."""
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
        """Indices of all batches."""
        _release_memory()
        yield from range(self.plan.images.count)

    def fit_block(self, block: str) -> None:
        """Fits norms and layers of a block, in the order of the forward."""
        is_read = any(block in names for names in self.plan.reads.values())
        for step in self.plan.blocks[block]:
            # What teacher and student finish in the runs of the fit, which saves runs behind it. No fit changes the
            # teacher. The student finishes early where nothing reads its output: then only the shape counts.
            early = step.finishes, '' if is_read or step.finishes != block else block
            if step.name in self.plan.fusions:
                self._absorb_norm(block, step, early)
            elif (hidden := self._count_hidden(step)) is not None or self._differs():
                self._fit_writer(block, step, hidden, early)
            else:
                early = '', ''
            both = zip((self.teacher, self.student), early, strict=True)
            walks = [walk for walk, finished in both if finished != step.finishes]
            for batch in self.batches() if walks else ():
                for walk in walks:
                    walk.run(batch, block, finish=step.finishes)

    def _differs(self) -> bool:
        """Whether the student computes something else than the teacher, so that there is something to fit."""
        return bool(self.report.pruned) or any(norm.outcome == 'absorbed' for norm in self.report.norms)

    def _absorb_norm(self, block: str, step: Step, early: tuple[str, str]) -> None:
        name, fusion, own = step.name, self.plan.fusions[step.name], self.plan.own
        moments, own_moments = _pair(self.plan.int8), _pair()
        for batch in self.batches():
            part = is_held_out(batch)
            source, target = self.teacher.run(batch, block, [step.source, step.target], early[0])
            if name not in own:
                own_moments[part].add(source, target)
            moments[part].add(*self.student.run(batch, block, [step.source], early[1]), target)
            # The next forwards need the memory.
            del source, target
        _check_finite(name, *moments)
        fit = choose_fit(*moments, diagonal_fit(moments[0]).matrix)
        if name not in own:
            own[name] = measured_part(*own_moments).unexplained(
                choose_fit(*own_moments, diagonal_fit(own_moments[0]).matrix)
            )
        shares = dict(own=own[name], left=measured_part(*moments).unexplained(fit))
        if name in self.names:
            reason = f'no affine map holds {own[name]:.1%} of it'
            self.report.norms.append(NormAbsorption(name, 'kept', reason=reason, **shares))
        else:
            self.report.norms.append(NormAbsorption(name, 'absorbed', **shares))
            apply_fold(self.model, fusion)
            fold_affine(self.model, fusion, *fit)

    def _count_hidden(self, step: Step) -> int | None:
        """How many hidden channels the FFN of a layer will have, in steps of 8; None if it stays as it is."""
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
        """Fits a layer so that the student's stream meets the teacher's; with ``hidden``, to fewer hidden channels."""
        layer, moments = self.model.get_submodule(step.name), _pair(self.plan.int8)
        for batch in self.batches():
            (target,) = self.teacher.run(batch, block, [step.target], early[0])
            source, stream = self.student.run(batch, block, [step.source, step.target], early[1])
            if isinstance(layer, nn.Conv2d) and source.ndim == 4:
                if target.ndim == 4:
                    source, stream, target = _patches(layer, source, stream), _some_rows(stream), _some_rows(target)
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
    """Adds to a layer the map of its inputs to what is missing of the stream, the targets of the moments.

    Returns the share of the mean square that is still missing.
    """
    if layer.bias is None:
        # The checkpoint of the student has no place for a shift.
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
    """Takes hidden channels, the inputs of the moments, out of an FFN and fits its second layer to the stream."""
    _, _, fc2 = find_ffn_layers(ffn)
    weight = fc2.weight.flatten(1)
    for part in {moments, measured_part(moments, held_out)}:
        # The target is everything that the FFN has to add, not only what the old FFN misses.
        part.add_to_target(weight, fc2.bias)
    stay = rank_channels(moments)[-hidden:].sort().values
    moments, held_out = moments.select(stay), held_out.select(stay)
    fit = choose_fit(moments, held_out, weight[:, stay].double())
    prune_ffn(ffn, stay)
    fc2.weight.copy_(fit.matrix.view_as(fc2.weight))
    fc2.bias.copy_(fit.shift)
    return FFNAbsorption(name, len(weight[0]), hidden, left=measured_part(moments, held_out).unexplained(fit))


def _release_memory() -> None:
    """Gives freed memory back to the system: glibc keeps pieces whose sizes fit no later step, as much as is in use."""
    if trim := getattr(ctypes.CDLL(None), 'malloc_trim', None):
        trim(0)


def _row_step(output: Tensor) -> int:
    return max(1, output.shape[-2] * output.shape[-1] // POSITIONS)


def _some_rows(output: Tensor) -> Tensor:
    """Some rows of a map, as tokens (B, N, C_out)."""
    return output[:, :, :: _row_step(output)].flatten(2).transpose(1, 2).clone()


def _patches(conv: nn.Conv2d, source: Tensor, output: Tensor) -> Tensor:
    """What a convolution reads for these rows, (B, N, C_in k k)."""
    stride = conv.stride[0] * _row_step(output), conv.stride[1]
    return nn.functional.unfold(source, conv.kernel_size, conv.dilation, conv.padding, stride).transpose(1, 2)


def _pair(int8: bool = False) -> tuple[CrossMoments, CrossMoments]:
    """Moments of the batches to fit, and of those held out."""
    return CrossMoments(int8), CrossMoments(int8)


def _check_finite(name: str, *parts: CrossMoments) -> None:
    if not all(part.count == 0 or (part.xx.isfinite().all() and part.yy.isfinite().all()) for part in parts):
        raise ConversionError(f'{name}: what it reads or writes is NaN or infinite; check weights and images')
