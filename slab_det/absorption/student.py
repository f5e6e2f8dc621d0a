"""Makes one student of an absorption: fits and folds its norms block by block, with the teacher run in parallel."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport, ChannelAbsorption, NormAbsorption
from slab_det.absorption.images import is_held_out
from slab_det.absorption.maps import combine_channels
from slab_det.absorption.plan import AbsorptionPlan, Step
from slab_det.absorption.refit import prune_and_refit, refit
from slab_det.absorption.regression import CrossMoments, choose_fit, diagonal_fit, measured_part, reduce_rank
from slab_det.absorption.tokens import (
    apply_to_columns,
    input_tokens,
    output_tokens,
    sample_patches,
    sample_rows,
    sample_tokens,
)
from slab_det.absorption.walk import Probe, Walk
from slab_det.fusion.channels import HiddenChannels, find_channels, output_parameters, resize_channels
from slab_det.fusion.fuse import apply_fold, fold_affine, past_report
from slab_det.fusion.fusion_report import FusionReport
from slab_det.runtime import read_checkpoint
from slab_det.runtime.copying import copy_module
from slab_det.runtime.errors import ConversionError
from slab_det.runtime.memory import release_memory
from slab_det.runtime.progress import Progress
from slab_det.runtime.run_folder import AtomicLocalBackend


def absorb_norms(plan: AbsorptionPlan, channels: Mapping[str, int], work_dir: Path, progress: bool = True) -> nn.Module:
    """Makes a student that has absorbed the norms of a plan and lost hidden channels.

    Args:
        plan: The steps and the images.
        channels: The number of channels to leave in each place that loses some, by name.
        work_dir: Folder for finished blocks, from which a later call resumes.
        progress: Show a progress bar.

    Returns:
        The fused student, with its reports.

    Raises:
        ConversionError: If values are not finite.
    """
    model, blocks = copy_teacher(plan), [*plan.blocks]
    absorption = Absorption(plan, model, channels, work_dir)
    first = absorption.resume()
    title = f'Absorption, {len(blocks) - first} of {len(blocks)} blocks'
    for block in Progress(blocks[first:], title, disable=not progress or first == len(blocks)):
        absorption.fit_block(block)
        absorption.save(block)
    report, past = absorption.report, past_report(plan.model)
    report.norms += [NormAbsorption(name, 'kept', reason=reason) for name, reason in plan.reasons.items() if reason]
    model.absorption_report = report
    model.fusion_report = FusionReport([*past.norms, *plan.fusions.values()], past.channels | _kept_channels(report))
    return model


def copy_teacher(plan: AbsorptionPlan) -> nn.Module:
    """A copy of the teacher with slab_det's own norms fused."""
    model = copy_module(plan.model)
    for fusion in plan.fusions.values():
        if fusion.outcome != 'absorbed':
            apply_fold(model, fusion)
    return model


# Most inputs of a layer that is fitted again because maps lost channels: the sums of more would take gigabytes.
MAX_COLUMNS = 8192


class Absorption:
    """The state of an absorption: the student, its teacher, and the report of the blocks fitted so far.

    Args:
        plan: The steps and the images.
        model: The student before any fit.
        channels: See :func:`absorb_norms`.
        work_dir: Folder for the weights that each block changed.

    Attributes:
        report: Report of the steps so far.
        saved: The student's weights when they were last saved or loaded.
        lost_logits: :attr:`ChannelAbsorption.logits` of attentions whose values are not fitted yet.
    """

    def __init__(self, plan: AbsorptionPlan, model: nn.Module, channels: Mapping[str, int], work_dir: Path) -> None:
        self.plan, self.model, self.channels, self.work_dir = plan, model, channels, work_dir
        self.teacher, self.student = (
            Walk(net, plan.forward(net), plan.reads, plan.images.store, name)
            for name, net in (('teacher', plan.model), ('student', model))
        )
        self.report, self.saved, self.lost_logits = AbsorptionReport(), {}, {}

    def file(self, block: str) -> Path:
        """The file of a finished block, shared by students that keep the same channels up to this block."""
        blocks = [*self.plan.blocks]
        steps = [step for name in blocks[: blocks.index(block) + 1] for step in self.plan.blocks[name]]
        channels = sorted((step.place, self.channels.get(step.place, 0)) for step in steps)
        digest = self.plan.digest.copy()
        digest.update(repr((block, channels)).encode())
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
                apply_fold(self.model, self.plan.fusions[norm.norm])
            resize_channels(self.model, _kept_channels(self.report))
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
        release_memory()
        yield from range(self.plan.images.count)

    def fit_block(self, block: str) -> None:
        """Fits the norms and layers of a block, in the order of the forward."""
        is_read = any(block in names for names in self.plan.reads.values())
        is_last = block == [*self.plan.blocks][-1]
        for step in self.plan.blocks[block]:
            if is_last and step.finishes == block:
                step = step._replace(finishes='')
            # The modules that teacher and student finish during the fit, which saves a run after it. No fit changes the
            # teacher's output. The student's output is not final before the fit, so the student finishes a block only
            # if no other block reads its values: then the shape of the output is enough.
            early = step.finishes, '' if is_read or step.finishes != block else block
            if step.name in self.plan.fusions:
                self._absorb_norm(block, step, early)
            elif step.name == step.place:
                early = '', ''
                if (pruned := self._find_pruned(step)) and pruned[0].tokens:
                    self._reduce_rank(block, step, *pruned)
                elif pruned and pruned[0].maps:
                    self._combine_channels(*pruned)
                elif pruned:
                    early = (step.finishes,) * 2
                    self._fit_readers(block, step.finishes, *pruned)
            elif step.place and step.target == Probe(step.name, 'output'):
                early = '', ''
                if any(place.place == step.place for place in self.report.pruned):
                    self._fit_map_reader(block, step)
            elif (pruned := self._find_pruned(step)) or self._differs_from_teacher():
                self._fit_writer(block, step, pruned, early)
            else:
                early = '', ''
            both = zip((self.teacher, self.student), early, strict=True)
            walks = [walk for walk, finished in both if finished != step.finishes]
            for batch in self.batches() if walks else ():
                for walk in walks:
                    walk.run(batch, block, finish=step.finishes)

    def _differs_from_teacher(self) -> bool:
        """Whether the student already differs from the teacher, so that a writer has something to correct."""
        return bool(self.report.pruned or self.report.norms)

    def _absorb_norm(self, block: str, step: Step, early: tuple[str, str]) -> None:
        fusion, moments = self.plan.fusions[step.name], _empty_moments(self.plan.int8)
        for batch in self.batches():
            (target,) = self.teacher.run(batch, block, [step.target], early[0])
            (source,) = self.student.run(batch, block, [step.source], early[1])
            moments[is_held_out(batch)].add(*sample_tokens(source, target))
            # Frees the memory for the next forwards.
            del source, target
        _check_finite(step.name, *moments)
        fit = choose_fit(*moments, diagonal_fit(moments[0]).matrix)
        left = measured_part(*moments).unexplained(fit)
        self.report.norms.append(NormAbsorption(step.name, 'absorbed', left=left))
        apply_fold(self.model, fusion)
        fold_affine(self.model, fusion, *fit)

    def _find_pruned(self, step: Step) -> tuple[HiddenChannels, int] | None:
        """The place of a step and the number of hidden channels to leave in it; None if it is not pruned."""
        if not step.place:
            return None
        place = find_channels(self.model)[step.place]
        kept = self.channels.get(place.name, place.count)
        if not place.reason and kept < place.count:
            return place, kept
        # Queries and keys are a step of the same place, before the step of the values.
        if place.reason and not (place.tokens and step.name == step.place):
            self.report.channels.append(ChannelAbsorption(place.name, reason=place.reason))
        return None

    def _reduce_rank(self, block: str, step: Step, place: HiddenChannels, kept: int) -> None:
        """Makes q and k of each head zero behind the channels that stay, with nearly the same logits."""
        queries, keys = CrossMoments(), CrossMoments()
        for batch in self.batches():
            if is_held_out(batch):
                continue
            tokens = self.student.run(batch, block, [step.source, step.target])
            for moments, part in zip((queries, keys), tokens, strict=True):
                (part,) = sample_tokens(part)
                moments.add(part, part[..., :1])
        _check_finite(step.name, queries, keys)
        weight, bias = output_parameters(self.model.get_submodule(place.writers[0]))
        padding = getattr(self.model.get_submodule(place.owner), 'padding_qkv', None)
        width = kept // place.heads
        self.lost_logits[place.name] = reduce_rank(queries, keys, weight, bias, place.heads, width, padding)

    def _combine_channels(self, place: HiddenChannels, kept: int) -> None:
        """Prunes channels of the neck's maps, with the finished maps."""
        moments = _empty_moments()
        for batch in self.batches():
            maps = self.student.run(batch, place.name, [Probe(writer, 'output') for writer in place.writers])
            for level, x in enumerate(maps):
                weight = output_tokens(self.plan.images.regions[batch].weights[level])
                tokens = output_tokens(x)
                moments[is_held_out(batch)].add(tokens, tokens[..., :1], weight)
            del maps
        _check_finite(place.name, *moments)
        stay, left = combine_channels(self.model, place, kept, *moments)
        self.report.channels.append(ChannelAbsorption(place.name, place.count, kept, left=left))
        self.student.select_channels(place.writers, stay)

    def _fit_map_reader(self, block: str, step: Step) -> None:
        """Fits a layer of a head that reads the neck's pruned maps, so that its output approaches the teacher's."""
        layer, moments = self.model.get_submodule(step.name), _empty_moments(self.plan.int8)
        if layer.weight[0].numel() > MAX_COLUMNS:
            return
        for batch in self.batches():
            (targets,) = self._run_head(self.teacher, batch, block, [step.target])
            (sources,) = self._run_head(self.student, batch, block, [step.source])
            for level, (target, source) in enumerate(zip(targets, sources, strict=True)):
                weight = self.plan.images.regions[batch].position_weights(block, level)
                weight = None if weight is None else output_tokens(weight)
                inputs = input_tokens(layer, source, target)
                error = output_tokens(target) - apply_to_columns(layer, inputs)
                moments[is_held_out(batch)].add(inputs, error, weight)
            del targets, sources, target, source, inputs, error
        _check_finite(step.name, *moments)
        self.report.refits[step.name] = refit(layer, *moments)

    def _run_head(
        self, walk: Walk, batch: int, block: str, probes: Sequence[Probe], finish: str = ''
    ) -> list[list[Tensor]]:
        """The tensors of every call of each probe. A head of regions is called once, so its run ends at the probes."""
        if self.plan.images.regions[batch].position_weights(block, 0) is None:
            return [[tensor] for tensor in walk.run(batch, block, probes, finish)]
        return walk.run_calls(batch, block, probes, finish)

    def _fit_readers(self, block: str, finish: str, place: HiddenChannels, kept: int) -> None:
        """Prunes channels of a head, and fits the layers that read them so that their outputs are the teacher's."""
        levels = place.readers_of_levels
        moments = [_empty_moments(self.plan.int8) for _ in levels]
        inputs = [Probe(names[0], 'input') for names in levels]
        outputs = [Probe(reader, 'output') for reader in place.readers]
        for batch in self.batches():
            targets = self._run_head(self.teacher, batch, block, outputs, finish)
            targets = dict(zip(place.readers, targets, strict=True))
            own = self._run_head(self.student, batch, block, inputs, finish)
            for level, (names, sources) in enumerate(zip(levels, own, strict=True)):
                layers = [*map(self.model.get_submodule, names)]
                # A head runs once on each level of the neck, either all of its layers or those of the level.
                calls = zip(sources, *map(targets.get, names), strict=True)
                for call, (source, *parts) in enumerate(calls):
                    weight = self.plan.images.regions[batch].position_weights(block, level + call)
                    weight = None if weight is None else output_tokens(weight)
                    target = torch.cat([*map(output_tokens, parts, layers)], -1)
                    moments[level][is_held_out(batch)].add(input_tokens(layers[0], source, parts[0]), target, weight)
                    del source, parts
            del targets, own, sources, calls
        _check_finite(place.name, *(part for parts in moments for part in parts))
        left = prune_and_refit(self.model, place, kept, moments)
        self.report.channels.append(ChannelAbsorption(place.name, place.count, kept, left=left))

    def _fit_writer(
        self, block: str, step: Step, pruned: tuple[HiddenChannels, int] | None, early: tuple[str, str]
    ) -> None:
        """Fits a layer so that the student's stream approaches the teacher's, after pruning the channels it reads."""
        layer, moments, streams = self.model.get_submodule(step.name), _empty_moments(self.plan.int8), _empty_moments()
        # A convolution of a neck is fitted to its own output, which need not be computed everywhere.
        fits_own_output = step.target == Probe(step.name, 'output')
        probes = [step.source] if fits_own_output else [step.source, step.target]
        for batch in self.batches():
            (target,) = self.teacher.run(batch, block, [step.target], early[0])
            found = self.student.run(batch, block, probes, early[1])
            if isinstance(layer, nn.Conv2d) and found[0].ndim == 4:
                if target.ndim == 4:
                    found = [sample_patches(layer, found[0], target), *map(sample_rows, found[1:])]
                    target = sample_rows(target)
                else:
                    # A convolution in an FFN has kernel 1 and writes tokens.
                    found[0] = found[0].flatten(2).transpose(1, 2)
            target, source, *streamed = sample_tokens(target, *found)
            stream = apply_to_columns(layer, source) if fits_own_output else streamed[0]
            moments[is_held_out(batch)].add(source, target - stream)
            if pruned:
                streams[is_held_out(batch)].add(target[..., :1], target)
            del found, source, streamed, stream, target
        _check_finite(step.name, *moments)
        if pruned:
            place, kept = pruned
            for part in {moments[0], measured_part(*moments)}:
                # The target becomes the whole output that the layer should have, not only the error before.
                bias = torch.zeros_like(part.mean_y) if layer.bias is None else layer.bias.detach()
                part.add_to_target(layer.weight.detach().flatten(1), bias)
            # Of images of a pixel, the stream may have no variance.
            share = measured_part(*moments).variance() / max(measured_part(*streams).variance(), 1e-300)
            left = share * prune_and_refit(self.model, place, kept, [moments])
            logits = self.lost_logits.get(place.name)
            self.report.channels.append(ChannelAbsorption(place.name, place.count, kept, left=left, logits=logits))
        else:
            self.report.refits[step.name] = refit(layer, *moments)


def _kept_channels(report: AbsorptionReport) -> dict[str, int]:
    return {place.place: place.kept for place in report.pruned}


def _empty_moments(int8: bool = False) -> tuple[CrossMoments, CrossMoments]:
    """Empty moments for the batches to fit, and for the held-out batches."""
    return CrossMoments(int8), CrossMoments(int8)


def _check_finite(name: str, *parts: CrossMoments) -> None:
    if not all(part.count == 0 or (part.xx.isfinite().all() and part.yy.isfinite().all()) for part in parts):
        raise ConversionError(f'{name}: its input or output is NaN or infinite; check weights and images')
