"""The steps of an absorption: each is one fit, of a norm, of a layer, or of layers that lose channels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from slab_det.absorption.absorption_report import ChannelAbsorption, NormAbsorption
from slab_det.absorption.images import is_held_out
from slab_det.absorption.maps import combine_channels
from slab_det.absorption.pair import Pair
from slab_det.absorption.refit import prune_and_refit, reduce_unit_rank, refit
from slab_det.absorption.regression import diagonal_fit
from slab_det.absorption.tokens import (
    apply_to_columns,
    input_tokens,
    output_tokens,
    sample_patches,
    sample_rows,
    sample_tokens,
)
from slab_det.absorption.walk import Probe
from slab_det.fusion.channels import output_parameters
from slab_det.fusion.folding import apply_fold, fold_affine

# Most inputs of a layer that is fitted again because maps lost channels: the sums of more would take gigabytes.
MAX_COLUMNS = 8192


@dataclass(frozen=True, kw_only=True)
class Step(ABC):
    """One fit.

    Attributes:
        name: The norm, layer or attention to fit, or the unit whose channels go.
        unit: Name of the unit whose channels the step may remove, or ''.
        finishes: Name of the module whose output no later step changes, so that it can be stored: the block, a branch
            of it such as an attention, or ''.
    """

    name: str
    unit: str = ''
    finishes: str = ''

    @abstractmethod
    def fit(self, pair: Pair) -> None:
        """Changes the student, and adds to the report."""


@dataclass(frozen=True, kw_only=True)
class NormStep(Step):
    """Replaces a LayerNorm by an affine map of its input, in the layers that read it."""

    @property
    def source(self) -> Probe:
        return Probe(self.name, 'input')

    @property
    def target(self) -> Probe:
        return Probe(self.name, 'output')

    def fit(self, pair: Pair) -> None:
        moments = pair.empty_moments()
        for batch in pair.batches():
            (target,) = pair.run_teacher(batch, self.target)
            (source,) = pair.run_student(batch, self.source)
            moments.add(batch, *sample_tokens(source, target))
            # Frees the memory for the next forwards.
            del source, target
        moments.check_finite(self.name)
        fit = moments.choose_fit(diagonal_fit(moments.fitted).matrix)
        pair.report.norms.append(NormAbsorption(self.name, 'absorbed', left=moments.measured.unexplained(fit)))
        apply_fold(pair.model, pair.fusions[self.name])
        fold_affine(pair.model, pair.fusions[self.name], *fit)


@dataclass(frozen=True, kw_only=True)
class RankStep(Step):
    """Makes q and k of each head of an attention zero behind the channels that stay, with nearly the same logits.

    Attributes:
        source: The tokens that queries come from.
        target: The tokens that keys come from.
    """

    source: Probe
    target: Probe

    def fit(self, pair: Pair) -> None:
        pruned = pair.find_pruned(self.unit)
        if not pruned:
            return
        unit, kept = pruned
        queries, keys = pair.empty_moments(), pair.empty_moments()
        for batch in (batch for batch in pair.batches() if not is_held_out(batch)):
            for moments, part in zip((queries, keys), pair.run_student(batch, self.source, self.target), strict=True):
                moments.add(batch, *sample_tokens(part))
        for moments in (queries, keys):
            moments.check_finite(self.name)
        reduce_unit_rank(pair.model, unit, kept, queries.fitted, keys.fitted)


@dataclass(frozen=True, kw_only=True)
class WriterStep(Step):
    """Fits a layer so that the student's stream approaches the teacher's, after pruning the channels that it reads.

    Attributes:
        source: The input of the layer.
        target: The stream behind the layer, or its own output.
    """

    source: Probe
    target: Probe

    def fit(self, pair: Pair) -> None:
        pruned = pair.find_pruned(self.unit) if self.unit else None
        if not (pruned or pair.differs()):
            return
        layer, moments, streams = pair.model.get_submodule(self.name), pair.empty_moments(), pair.empty_moments()
        # A convolution of a neck is fitted to its own output, which need not be computed everywhere.
        fits_own_output = self.target == Probe(self.name, 'output')
        probes = [self.source] if fits_own_output else [self.source, self.target]
        for batch in pair.batches():
            (target,) = pair.run_teacher(batch, self.target)
            found = pair.run_student(batch, *probes)
            if isinstance(layer, nn.Conv2d) and found[0].ndim == 4:
                if target.ndim == 4:
                    found = [sample_patches(layer, found[0], target), *map(sample_rows, found[1:])]
                    target = sample_rows(target)
                else:
                    # A convolution in an FFN has kernel 1 and writes tokens.
                    found[0] = found[0].flatten(2).transpose(1, 2)
            target, source, *streamed = sample_tokens(target, *found)
            stream = apply_to_columns(layer, source) if fits_own_output else streamed[0]
            moments.add(batch, source, target - stream)
            if pruned:
                streams.add(batch, target[..., :1], target)
            del found, source, streamed, stream, target
        moments.check_finite(self.name)
        if not pruned:
            pair.report.refits[self.name] = refit(layer, moments)
            return
        unit, kept = pruned
        # The target becomes the whole output that the layer should have, not only the error before.
        weight, bias = output_parameters(layer)
        bias = weight.new_zeros(len(weight)) if bias is None else bias.detach()
        moments = moments.map(lambda part: part.add_to_target(weight.detach().flatten(1), bias))
        # Of images of a pixel, the stream may have no variance.
        share = moments.measured.variance() / max(streams.measured.variance(), 1e-300)
        left = share * prune_and_refit(pair.model, unit, kept, [moments])
        pair.report.channels.append(ChannelAbsorption(unit.name, unit.count, kept, left=left))


@dataclass(frozen=True, kw_only=True)
class MapStep(Step):
    """Prunes channels of the neck's maps, when the maps are finished."""

    def fit(self, pair: Pair) -> None:
        pruned = pair.find_pruned(self.unit)
        if not pruned:
            return
        unit, kept = pruned
        moments = pair.empty_moments()
        for batch in pair.batches():
            # The unit stands for a block that reads the finished maps.
            maps = pair.student.run(batch, unit.name, [Probe(writer, 'output') for writer in unit.writers])
            for level, x in enumerate(maps):
                weight = output_tokens(pair.images.regions[batch].weights[level])
                moments.add(batch, output_tokens(x), weight=weight)
            del maps
        moments.check_finite(unit.name)
        stay, left = combine_channels(pair.model, unit, kept, moments)
        pair.report.channels.append(ChannelAbsorption(unit.name, unit.count, kept, left=left))
        pair.student.select_channels(unit.writers, stay)


@dataclass(frozen=True, kw_only=True)
class MapReaderStep(Step):
    """Fits a layer of a head that reads pruned maps, so that its output approaches the teacher's."""

    def can_fit(self, model: nn.Module) -> bool:
        """Whether the sums of the layer's inputs fit into memory."""
        return model.get_submodule(self.name).weight[0].numel() <= MAX_COLUMNS

    def fit(self, pair: Pair) -> None:
        layer, moments = pair.model.get_submodule(self.name), pair.empty_moments()
        if all(pruned.unit != self.unit for pruned in pair.report.pruned) or not self.can_fit(pair.model):
            return
        for batch in pair.batches():
            (targets,) = pair.run_teachers_head(batch, [Probe(self.name, 'output')])
            (sources,) = pair.run_students_head(batch, [Probe(self.name, 'input')])
            for level, (target, source) in enumerate(zip(targets, sources, strict=True)):
                weight = pair.position_weights(batch, level)
                weight = None if weight is None else output_tokens(weight)
                inputs = input_tokens(layer, source, target)
                error = output_tokens(target) - apply_to_columns(layer, inputs)
                moments.add(batch, inputs, error, weight)
            del targets, sources, target, source, inputs, error
        moments.check_finite(self.name)
        pair.report.refits[self.name] = refit(layer, moments)


@dataclass(frozen=True, kw_only=True)
class HeadStep(Step):
    """Prunes channels of a head, and fits the layers that read them so that their outputs are the teacher's."""

    def fit(self, pair: Pair) -> None:
        pruned = pair.find_pruned(self.unit)
        if not pruned:
            return
        unit, kept = pruned
        levels = unit.readers_of_levels
        moments = [pair.empty_moments() for _ in levels]
        inputs = [Probe(names[0], 'input') for names in levels]
        outputs = [Probe(reader, 'output') for reader in unit.readers]
        for batch in pair.batches():
            targets = dict(zip(unit.readers, pair.run_teachers_head(batch, outputs), strict=True))
            own = pair.run_students_head(batch, inputs)
            for level, (names, sources) in enumerate(zip(levels, own, strict=True)):
                layers = [*map(pair.model.get_submodule, names)]
                # A head runs once on each level of the neck, either all of its layers or those of the level.
                calls = zip(sources, *map(targets.get, names), strict=True)
                for call, (source, *parts) in enumerate(calls):
                    weight = pair.position_weights(batch, level + call)
                    weight = None if weight is None else output_tokens(weight)
                    target = torch.cat([*map(output_tokens, parts, layers)], -1)
                    moments[level].add(batch, input_tokens(layers[0], source, parts[0]), target, weight)
                    del source, parts
            del targets, own, sources, calls
        for part in moments:
            part.check_finite(unit.name)
        left = prune_and_refit(pair.model, unit, kept, moments)
        pair.report.channels.append(ChannelAbsorption(unit.name, unit.count, kept, left=left))
