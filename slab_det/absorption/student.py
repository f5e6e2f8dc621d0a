"""One student of an absorption: its norms go into its linear layers, unit by unit, beside the teacher."""

from __future__ import annotations

import ctypes
import io
import math
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from slab_det.absorption.plan import AbsorptionPlan, Writer
from slab_det.absorption.regression import CrossMoments, choose_fit, diagonal_fit, rank_channels
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

M = TypeVar('M', CrossMoments, Moments)
# Positions of a map, at least, at which a convolution of the neck is fitted: one input there is a whole patch.
POSITIONS = 4096


class Absorption:
    """One student: every norm is absorbed but those named.

    Args:
        plan: What is fitted, on which images.
        names: Norms that stay.
        work_dir: A folder for what is finished, from which a later call goes on.
        progress: Show a progress bar.

    Attributes:
        student: The fused model, with its reports.

    Raises:
        ConversionError: If ``names`` holds no such norm, or values are not finite.
    """

    def __init__(
        self,
        plan: AbsorptionPlan,
        names: Collection[str] = (),
        work_dir: Path | None = None,
        progress: bool = True,
    ) -> None:
        if unknown := {*names} - {name for name, reason in plan.reasons.items() if not reason}:
            known = ', '.join(name for name, reason in plan.reasons.items() if not reason)
            raise ConversionError(f'keep: {", ".join(sorted(unknown))} cannot be absorbed anyhow; these can: {known}')
        self.plan, self.names = plan, {*names}
        self.batches = range(plan.images.count)
        self.report = AbsorptionReport()
        self.student = copy_module(plan.model)
        # Modules that show what their layers read.
        for name, module in list(self.student.named_modules()):
            if make := find_rule(module, 'replace'):
                replace_module(self.student, name, make())
        for fusion in plan.fusions.values():
            if fusion.outcome != 'absorbed':
                apply_fold(self.student, fusion)
        self.state_file = work_dir and work_dir / f'absorb_{self._key()}.pth'
        first, last = self._resume(), len(plan.units)
        steps = sum(len(steps) + 1 for steps in plan.steps[first:]) + (first < last)
        self.bar = Progress(
            desc=f'Absorption, {last - first} of {last} units',
            total=steps * len(self.batches),
            disable=not progress or first == last,
        )
        with self.bar:
            with tempfile.TemporaryDirectory(dir=plan.folder) as folder:
                images = plan.images.store
                store = TensorStore(Path(folder), images.device, images.left)
                self.teacher_walk, self.student_walk = (
                    Walk(model, plan.forward(model), plan.units, plan.last_uses, images, store, name)
                    for name, model in (('teacher', plan.model), ('student', self.student))
                )
                if first < last:
                    for batch in self._progress():
                        for walk in (self.teacher_walk, self.student_walk):
                            walk.advance(batch, first)
                for unit in range(first, last):
                    self._fit_unit(unit)
                    self._save(unit + 1)
        kept = {norm.norm for norm in self.report.kept}
        fusions = [
            replace(f, outcome='kept', into='', reason='kept by choice') if f.norm in kept else f
            for f in plan.fusions.values()
        ]
        self.report.norms += [NormAbsorption(n, 'kept', reason=reason) for n, reason in plan.reasons.items() if reason]
        self.student.absorption_report = self.report
        ffns = {**past_ffns(plan.model), **{ffn.ffn: ffn.hidden for ffn in self.report.pruned}}
        self.student.fusion_report = FusionReport([*past_fusions(plan.model), *fusions], ffns)

    def _fit_unit(self, unit: int) -> None:
        # Whose outputs are not stored yet.
        last = len(self.plan.units)
        walks = [self.teacher_walk, self.student_walk] if unit + 1 < last else []
        for step in self.plan.steps[unit]:
            if not isinstance(step, Writer):
                self.report.norms.append(self._absorb_norm(unit, step))
                continue
            prunes = self._prunes(step)
            # Before the first change the student is the teacher: there is nothing to fit.
            if prunes or self.report.pruned or any(norm.outcome == 'absorbed' for norm in self.report.norms):
                stored = []
                if step is self.plan.steps[unit][-1]:
                    # No fit changes an output of the teacher; of one that nothing reads only the shape is kept.
                    stored = walks[:1] if self.plan.last_uses.get(unit, last) > unit else walks
                result = self._fit_writer(unit, step, stored, prunes)
                (self.report.refits if isinstance(result, Refit) else self.report.ffns).append(result)
                walks = walks[len(stored) :]
        for batch in self._progress():
            for walk in walks:
                walk.run(batch, unit, (), store=True)

    def _prunes(self, step: Writer) -> bool:
        """Whether the FFN around a writer loses hidden channels."""
        if not (self.plan.ffn and step.ffn):
            return False
        try:
            fc1, _, _ = find_ffn_layers(self.student.get_submodule(step.ffn))
            if self._count_hidden(len(fc1.weight)) == len(fc1.weight):
                raise CannotFold('it has too few hidden channels')
        except CannotFold as reason:
            left = FFNAbsorption(step.ffn, reason=str(reason))
            self.report.ffns.append(left)
            return False
        return True

    def _count_hidden(self, channels: int) -> int:
        """Hidden channels that stay, in steps of 8, which matrix products are made for."""
        return min(channels, 8 * max(1, math.ceil((1 - self.plan.ffn) * channels / 8 - 1e-9)))

    def _progress(self) -> Iterator[int]:
        # eval() drops the biases that attentions keep for one size of image: in Swin-S, at 800x1333, 316 MB in all.
        self.plan.model.eval()
        self.student.eval()
        _release_memory()
        for batch in self.batches:
            yield batch
            self.bar.update()

    def _absorb_norm(self, unit: int, name: str) -> NormAbsorption:
        # Of the student's inputs and of the teacher's own, each to fit and held out.
        (moments, held_out), own = _pair(self.plan.int8), _pair()
        for batch in self._progress():
            part = self.plan.images.is_held_out(batch)
            source, target = self.teacher_walk.run(batch, unit, (Probe(name, 'input'), Probe(name, 'output')))
            if name not in self.plan.own:
                own[part].add(source, target)
            (moments, held_out)[part].add(*self.student_walk.run(batch, unit, (Probe(name, 'input'),)), target)
            # The next forwards need the memory.
            del source, target
        _check_finite(name, moments, held_out)
        diagonal = diagonal_fit(moments)
        fit, ridge = choose_fit(moments, held_out, diagonal.matrix)
        judge = _judge(moments, held_out)
        if name not in self.plan.own:
            own_fit, _ = choose_fit(*own, diagonal_fit(own[0]).matrix)
            self.plan.own[name] = _judge(*own).unexplained(own_fit)
        result = NormAbsorption(
            name,
            'absorbed',
            self.plan.fusions[name].into,
            own=self.plan.own[name],
            diagonal=judge.unexplained(diagonal),
            left=judge.unexplained(fit),
            ridge=ridge,
        )
        if name in self.names:
            return replace(result, outcome='kept', into='', reason=f'no affine map holds {result.own:.1%} of it')
        apply_fold(self.student, self.plan.fusions[name])
        fold_affine(self.student, self.plan.fusions[name], *fit)
        return result

    def _fit_writer(self, unit: int, writer: Writer, stored: Collection[Walk], prunes: bool) -> Refit | FFNAbsorption:
        layer = self.student.get_submodule(writer.layer)
        (moments, held_out), targets = _pair(self.plan.int8), (Moments(), Moments())
        for batch in self._progress():
            (target,) = self.teacher_walk.run(batch, unit, (writer.stream,), store=self.teacher_walk in stored)
            # A convolution in an FFN has kernel 1 and writes tokens.
            of_neck = isinstance(layer, nn.Conv2d) and target.ndim == 4 and not prunes
            if of_neck:
                target = _some_rows(target)
            probes = writer.source, writer.stream
            source, stream = self.student_walk.run(batch, unit, probes, store=self.student_walk in stored)
            if of_neck:
                source, stream = _patches(layer, source, stream), _some_rows(stream)
            elif isinstance(layer, nn.Conv2d) and source.ndim == 4:
                source = source.flatten(2).transpose(1, 2)
            part = self.plan.images.is_held_out(batch)
            targets[part].add(target)
            (moments, held_out)[part].add(source, target - stream)
            del source, stream, target
        if prunes:
            return self._prune(writer.ffn, moments, held_out, _judge(*targets))
        return _refit(writer.layer, layer, moments, held_out, _judge(*targets))

    @torch.no_grad()
    def _prune(self, name: str, moments: CrossMoments, held_out: CrossMoments, target: Moments) -> FFNAbsorption:
        """Takes hidden channels out of an FFN and fits its second layer to the teacher's stream.

        Args:
            name: Name of the FFN.
            moments: Moments of the hidden channels and of what is missing of the stream.
            held_out: The same sums over images that no fit sees.
            target: Moments of the teacher's stream.
        """
        _check_finite(name, moments, held_out)
        variance, judge = max(float(target.var.sum()), 1e-300), _judge(moments, held_out)
        before = _mean_square(judge) / variance
        ffn = self.student.get_submodule(name)
        _, _, fc2 = find_ffn_layers(ffn)
        weight = fc2.weight.flatten(1)
        for part in {moments, judge}:
            # The target is everything that the FFN has to add, not only what the old FFN misses.
            part.add_to_target(weight, fc2.bias)
        hidden = self._count_hidden(weight.shape[1])
        stay = rank_channels(moments)[-hidden:].sort().values
        moments, held_out, judge = (part.select(stay) for part in (moments, held_out, judge))
        fit, ridge = choose_fit(moments, held_out, weight[:, stay].double())
        prune_ffn(ffn, stay)
        fc2.weight.copy_(fit.matrix.view_as(fc2.weight))
        fc2.bias.copy_(fit.shift)
        after = judge.unexplained(fit) * float(judge.yy.sum() / judge.count) / variance
        return FFNAbsorption(name, len(weight[0]), hidden, before=before, after=after, ridge=ridge)

    def _key(self) -> str:
        """Tells students apart: another teacher, other images or other norms to keep."""
        digest = self.plan.digest.copy()
        digest.update(repr(sorted(self.names)).encode())
        return digest.hexdigest()[:16]

    def _prefix(self, unit: int) -> tuple[int, frozenset[str]]:
        """What students have in common that are alike up to a unit."""
        return unit, frozenset(step for steps in self.plan.steps[:unit] for step in steps if step in self.names)

    def _save(self, unit: int) -> None:
        state = dict(unit=unit, weights=self.student.state_dict(), report=self.report.to_dict())
        if self.state_file:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            AtomicLocalBackend().put(buffer.getvalue(), self.state_file)
        # The states of all units share what did not change between them.
        old = self.plan.states.get(self._prefix(unit - 1), dict(weights={}))['weights']
        for name, value in state['weights'].items():
            same = name in old and torch.equal(old[name], value)
            state['weights'][name] = old[name] if same else value.clone()
        self.plan.states[self._prefix(unit)] = state

    def _resume(self) -> int:
        """Loads what an earlier call or another student finished; returns the unit to go on from."""
        prefixes = map(self._prefix, range(len(self.plan.units), 0, -1))
        state = next((self.plan.states[prefix] for prefix in prefixes if prefix in self.plan.states), dict(unit=0))
        if self.state_file and self.state_file.exists():
            state = max(state, read_checkpoint(self.state_file), key=itemgetter('unit'))
        if not state['unit']:
            return 0
        self.report = AbsorptionReport.from_dict(state['report'])
        for norm in self.report.norms:
            if norm.outcome == 'absorbed':
                apply_fold(self.student, self.plan.fusions[norm.norm])
        for ffn in self.report.pruned:
            prune_ffn(self.student.get_submodule(ffn.ffn), torch.arange(ffn.hidden))
        self.student.load_state_dict(state['weights'])
        return state['unit']


@torch.no_grad()
def _refit(
    name: str, layer: nn.Linear | nn.Conv2d, moments: CrossMoments, held_out: CrossMoments, target: Moments
) -> Refit:
    """Adds to a layer the map of its inputs to what is missing of the target, the second variables of the moments."""
    _check_finite(name, moments, held_out)
    if layer.bias is None:
        # The checkpoint of the student has no place for a shift.
        moments, held_out = moments.about_zero(), held_out.about_zero()
    fit, ridge = choose_fit(moments, held_out, moments.xy.new_zeros(moments.xy.T.shape))
    judge = _judge(moments, held_out)
    # A stream of one token per image may not vary.
    variance = max(float(target.var.sum()), 1e-300)
    before = _mean_square(judge) / variance
    after = judge.unexplained(fit) * float(judge.yy.sum() / judge.count) / variance
    if after < before:
        layer.weight += fit.matrix.view_as(layer.weight)
        if layer.bias is not None:
            layer.bias += fit.shift
    return Refit(name, before, min(before, after), ridge)


def _mean_square(moments: CrossMoments) -> float:
    """The mean squared target over tokens: what is left where nothing is fitted."""
    return float(moments.yy.sum() / moments.count + moments.mean_y.square().sum())


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


def _judge(moments: M, held_out: M) -> M:
    """The tokens that say what is left: those held out, or all where there are none."""
    return held_out if held_out.count else moments
