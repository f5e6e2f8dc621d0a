"""One student of an absorption: block by block, beside the teacher, its norms go into its linear layers."""

from __future__ import annotations

import ctypes
import io
import math
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product, takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from slab_det.absorption.plan import AbsorptionPlan, Writer, find_forward
from slab_det.absorption.regression import CrossMoments, choose_fit, diagonal_fit, measured_part, rank_channels
from slab_det.absorption.report import AbsorptionReport, FFNAbsorption, NormAbsorption, Refit
from slab_det.absorption.walk import Probe, TensorStore, Walk
from slab_det.fusion.ffn_pruning import find_ffn_layers, prune_ffn
from slab_det.fusion.folds import CannotFold, find_rule
from slab_det.fusion.fuse import apply_fold, fold_affine, past_ffns, past_fusions, replace_module
from slab_det.fusion.report import FusionReport
from slab_det.norms import copy_module
from slab_det.recalibration.moments import Moments
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
    model, images = _copy_teacher(plan), plan.images
    with tempfile.TemporaryDirectory(dir=plan.folder) as folder:
        store = TensorStore(Path(folder), images.store.device, images.store.left)
        teacher, student = (
            Walk(each, find_forward(each, plan.runs_neck), plan.reads, images.store, store, name)
            for name, each in (('teacher', plan.model), ('student', model))
        )
        absorption = Absorption(plan, teacher, student, {*names}, work_dir or plan.folder)
        first, blocks = absorption.resume(), [*plan.blocks]
        runs = sum(1 + bool(step.finishes) for block in blocks[first:] for step in plan.blocks[block])
        is_done = first == len(blocks)
        with Progress(
            desc=f'Absorption, {len(blocks) - first} of {len(blocks)} blocks',
            total=(runs + (first > 0)) * images.count,
            disable=not progress or is_done,
        ) as absorption.bar:
            for batch in absorption.batches() if first and not is_done else ():
                for walk, block in product((teacher, student), blocks[:first]):
                    walk.run(batch, block, finish=block)
            for block in blocks[first:]:
                absorption.fit_block(block)
                absorption.save(block)
    return _add_reports(plan, model, absorption.report)


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


def _add_reports(plan: AbsorptionPlan, model: nn.Module, report: AbsorptionReport) -> nn.Module:
    kept = {norm.norm for norm in report.kept}
    fusions = [
        replace(fusion, outcome='kept', into='', reason='kept by choice') if fusion.norm in kept else fusion
        for fusion in plan.fusions.values()
    ]
    report.norms += [NormAbsorption(name, 'kept', reason=reason) for name, reason in plan.reasons.items() if reason]
    ffns = {**past_ffns(plan.model), **{ffn.ffn: ffn.hidden for ffn in report.pruned}}
    model.absorption_report = report
    model.fusion_report = FusionReport([*past_fusions(plan.model), *fusions], ffns)
    return model


class Absorption:
    """A student on its way through the blocks, beside its teacher.

    Args:
        plan: What is fitted, on which images.
        teacher: The walk of the teacher.
        student: The walk of the student.
        names: Norms that stay.
        folder: Gets the weights that each block changed.

    Attributes:
        report: What was fitted so far.
        bar: A progress bar.
        saved: The student's weights when it was last saved or loaded.
    """

    def __init__(self, plan: AbsorptionPlan, teacher: Walk, student: Walk, names: set[str], folder: Path) -> None:
        self.plan, self.teacher, self.student, self.names, self.folder = plan, teacher, student, names, folder
        self.model, self.report = student.model, AbsorptionReport()
        self.bar: Progress | None = None
        self.saved: dict[str, Tensor] = {}

    def file(self, block: str) -> Path:
        """The file of a block: students share it if they have kept the same norms so far."""
        blocks = [*self.plan.blocks]
        targets = {step.target for name in blocks[: blocks.index(block) + 1] for step in self.plan.blocks[name]}
        digest = self.plan.digest.copy()
        digest.update(repr((block, sorted(self.names & targets))).encode())
        return self.folder / f'absorb_{digest.hexdigest()[:16]}.pth'

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
        """Loads what other calls saved; returns the number of finished blocks."""
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
        return len(files)

    def batches(self) -> Iterator[int]:
        """Indices of all batches, with a bar."""
        # eval() drops the biases that attentions keep for one size of image: in Swin-S, at 800x1333, 316 MB in all.
        self.plan.model.eval()
        self.model.eval()
        _release_memory()
        for batch in range(self.plan.images.count):
            yield batch
            self.bar.update()

    def fit_block(self, block: str) -> None:
        """Fits norms and layers of a block, in the order of the forward."""
        is_read = any(block in names for names in self.plan.reads.values())
        for step in self.plan.blocks[block]:
            # No fit changes the teacher, which finishes in the run that the fit needs anyhow. So does a student whose
            # output nothing reads: only its shape counts.
            ends = step.finishes, '' if is_read or step.finishes != block else block
            if isinstance(step.target, str):
                self._absorb_norm(block, step.target, ends)
            elif (hidden := self._count_hidden(step.target)) is not None or self._differs():
                self._fit_writer(block, step.target, hidden, ends)
            else:
                ends = '', ''
            walks = [walk for walk, end in zip((self.teacher, self.student), ends, strict=True) if end != step.finishes]
            for batch in self.batches() if walks else ():
                for walk in walks:
                    walk.run(batch, block, finish=step.finishes)

    def _differs(self) -> bool:
        """Whether the student computes something else than the teacher, so that there is something to fit."""
        return bool(self.report.pruned) or any(norm.outcome == 'absorbed' for norm in self.report.norms)

    def _absorb_norm(self, block: str, name: str, ends: tuple[str, str]) -> None:
        (moments, held_out), own = _pair(self.plan.int8), _pair()
        for batch in self.batches():
            part = self.plan.images.is_held_out(batch)
            source, target = self.teacher.run(batch, block, [Probe(name, 'input'), Probe(name, 'output')], ends[0])
            if name not in self.plan.own:
                own[part].add(source, target)
            (moments, held_out)[part].add(*self.student.run(batch, block, [Probe(name, 'input')], ends[1]), target)
            # The next forwards need the memory.
            del source, target
        _check_finite(name, moments, held_out)
        diagonal = diagonal_fit(moments)
        fit, ridge = choose_fit(moments, held_out, diagonal.matrix)
        if name not in self.plan.own:
            own_fit, _ = choose_fit(*own, diagonal_fit(own[0]).matrix)
            self.plan.own[name] = measured_part(*own).unexplained(own_fit)
        judge, fusion, share = measured_part(moments, held_out), self.plan.fusions[name], self.plan.own[name]
        if name in self.names:
            result = NormAbsorption(name, 'kept', reason=f'no affine map holds {share:.1%} of it')
        else:
            result = NormAbsorption(name, 'absorbed', fusion.into)
            apply_fold(self.model, fusion)
            fold_affine(self.model, fusion, *fit)
        shares = dict(own=share, diagonal=judge.unexplained(diagonal), left=judge.unexplained(fit))
        self.report.norms.append(replace(result, **shares, ridge=ridge))

    def _count_hidden(self, writer: Writer) -> int | None:
        """How many hidden channels the FFN of a writer will have, in steps of 8; None if it stays as it is."""
        if not (self.plan.ffn and writer.ffn):
            return None
        try:
            channels = len(find_ffn_layers(self.model.get_submodule(writer.ffn))[0].weight)
            hidden = 8 * max(1, math.ceil((1 - self.plan.ffn) * channels / 8 - 1e-9))
            if hidden >= channels:
                raise CannotFold('it has too few hidden channels')
        except CannotFold as reason:
            self.report.ffns.append(FFNAbsorption(writer.ffn, reason=str(reason)))
            return None
        return hidden

    def _fit_writer(self, block: str, writer: Writer, hidden: int | None, ends: tuple[str, str]) -> None:
        """Fits a layer so that the student's stream meets the teacher's; with ``hidden``, to fewer hidden channels."""
        layer = self.model.get_submodule(writer.layer)
        (moments, held_out), targets = _pair(self.plan.int8), (Moments(), Moments())
        for batch in self.batches():
            (target,) = self.teacher.run(batch, block, [writer.stream], ends[0])
            source, stream = self.student.run(batch, block, [writer.source, writer.stream], ends[1])
            if isinstance(layer, nn.Conv2d) and source.ndim == 4:
                if target.ndim == 4:
                    source, stream, target = _patches(layer, source, stream), _some_rows(stream), _some_rows(target)
                else:
                    # A convolution in an FFN has kernel 1 and writes tokens.
                    source = source.flatten(2).transpose(1, 2)
            part = self.plan.images.is_held_out(batch)
            targets[part].add(target)
            (moments, held_out)[part].add(source, target - stream)
            del source, stream, target
        _check_finite(writer.layer, moments, held_out)
        # A stream of one token per image may not vary.
        variance = max(float(measured_part(*targets).var.sum()), 1e-300)
        if hidden is None:
            self.report.refits.append(_refit(writer.layer, layer, moments, held_out, variance))
        else:
            ffn = self.model.get_submodule(writer.ffn)
            self.report.ffns.append(_prune(writer.ffn, ffn, hidden, moments, held_out, variance))


@torch.no_grad()
def _refit(
    name: str, layer: nn.Linear | nn.Conv2d, moments: CrossMoments, held_out: CrossMoments, variance: float
) -> Refit:
    """Adds to a layer the map of its inputs to what is missing of the stream, the targets of the moments."""
    if layer.bias is None:
        # The checkpoint of the student has no place for a shift.
        moments, held_out = moments.about_zero(), held_out.about_zero()
    fit, ridge = choose_fit(moments, held_out, moments.xy.new_zeros(moments.xy.T.shape))
    judge = measured_part(moments, held_out)
    before, after = judge.mean_square() / variance, judge.unexplained(fit) * judge.variance() / variance
    if after < before:
        layer.weight += fit.matrix.view_as(layer.weight)
        if layer.bias is not None:
            layer.bias += fit.shift
    return Refit(name, before, min(before, after), ridge)


@torch.no_grad()
def _prune(
    name: str, ffn: nn.Module, hidden: int, moments: CrossMoments, held_out: CrossMoments, variance: float
) -> FFNAbsorption:
    """Takes hidden channels, the inputs of the moments, out of an FFN and fits its second layer to the stream."""
    _, _, fc2 = find_ffn_layers(ffn)
    weight, judge = fc2.weight.flatten(1), measured_part(moments, held_out)
    before = judge.mean_square() / variance
    for part in {moments, judge}:
        # The target is everything that the FFN has to add, not only what the old FFN misses.
        part.add_to_target(weight, fc2.bias)
    stay = rank_channels(moments)[-hidden:].sort().values
    moments, held_out, judge = (part.select(stay) for part in (moments, held_out, judge))
    fit, ridge = choose_fit(moments, held_out, weight[:, stay].double())
    prune_ffn(ffn, stay)
    fc2.weight.copy_(fit.matrix.view_as(fc2.weight))
    fc2.bias.copy_(fit.shift)
    after = judge.unexplained(fit) * judge.variance() / variance
    return FFNAbsorption(name, len(weight[0]), hidden, before=before, after=after, ridge=ridge)


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
