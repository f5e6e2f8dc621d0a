"""The plan of an absorption of norms: which norms and layers are fitted, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from slab_det.absorption.absorption_report import KEPT_BY_CHOICE
from slab_det.absorption.images import Images
from slab_det.absorption.norms.steps import NormStep, Step, StreamStep
from slab_det.absorption.norms.walk import find_reads
from slab_det.absorption.probes import Probe, find_stream_layers, is_in_backbone, is_shared, trace
from slab_det.backbones.adopt import MMDET_ATTENTIONS, why_not_adopted
from slab_det.common.errors import ConversionError
from slab_det.common.modules import copy_module
from slab_det.fusion.folding import (
    NormFusion,
    apply_fold,
    check_fusible,
    containers_of,
    plan_folds,
    reason_to_keep,
)
from slab_det.norms import named_norms
from slab_det.norms.folds import find_rule


@dataclass(frozen=True)
class NormPlan:
    """How norms are absorbed.

    Attributes:
        teacher: The teacher.
        images: See :class:`Images`.
        int8: See :func:`slab_det.absorb`.
        fusions: The layers that each norm is folded into if it is absorbed, by the name of the norm.
        reasons: Why each LayerNorm stays, or '', by the name of the norm.
        blocks: The steps of each block in the order of the forward, by the name of the block.
    """

    teacher: nn.Module
    images: Images
    int8: bool
    fusions: dict[str, NormFusion]
    reasons: dict[str, str]
    blocks: dict[str, list[Step]]

    @property
    def absorbed(self) -> list[str]:
        """The names of the norms that go."""
        return [step.name for steps in self.blocks.values() for step in steps if isinstance(step, NormStep)]

    @cached_property
    def reads(self) -> dict[str, set[str]]:
        """What each block reads; see :class:`slab_det.absorption.norms.walk.Walk`."""
        return find_reads(self.teacher, self.blocks, self.images.store.get('0'))

    def copy_teacher(self) -> nn.Module:
        """A copy of the teacher with slab_det's own norms fused."""
        model = copy_module(self.teacher)
        for fusion in self.fusions.values():
            if fusion.outcome != 'absorbed':
                apply_fold(model, fusion)
        return model


def plan_norms(model: nn.Module, images: Images, norms: str | Collection[str], int8: bool = False) -> NormPlan:
    """Runs the model to find which norms can be absorbed, and in which order; :func:`slab_det.absorb` has the errors.

    Args:
        model: The teacher, in eval mode.
        images: Its images.
        norms: See :func:`slab_det.absorb`.
        int8: See :func:`slab_det.absorb`.
    """
    _check_absorbable(model)
    layers = find_stream_layers(model)
    steps: list[Step] = [
        NormStep(name=name, source=Probe(name, 'input'), target=Probe(name, 'output'))
        for name, _ in named_norms(model, nn.LayerNorm)
    ]
    steps += [StreamStep(name=layer.name, source=layer.source, target=layer.target) for layer in layers]
    probes = [probe for step in steps for probe in (step.source, step.target, Probe(step.name, 'output'))]
    calls = trace(model, images.store.get('0'), probes)
    fusions, reasons = _find_folds(model, calls, norms)
    left = [step for step in steps if not (isinstance(step, NormStep) and reasons[step.name])]
    return NormPlan(model, images, int8, fusions, reasons, _plan_blocks(model, calls, left))


def _find_folds(
    model: nn.Module, calls: list[Probe], norms: str | Collection[str]
) -> tuple[dict[str, NormFusion], dict[str, str]]:
    """The folds of all norms, and why each LayerNorm stays, or ''; both by the name of the norm."""
    layer_norms = dict(named_norms(model, nn.LayerNorm))
    reasons = {name: _why_not_absorbable(model, name, norm, calls) for name, norm in layer_norms.items()}
    if norms == 'keep':
        reasons = {name: reason or KEPT_BY_CHOICE for name, reason in reasons.items()}
    candidates = [layer_norms[name] for name, reason in reasons.items() if not reason]
    fusions = {fusion.norm: fusion for fusion in plan_folds(model, candidates)}
    reasons = {name: reason or fusions[name].reason for name, reason in reasons.items()}
    stay = () if isinstance(norms, str) else norms
    possible = [name for name, reason in reasons.items() if not reason]
    if unknown := ', '.join(sorted({*stay} - {*possible})):
        raise ConversionError(f'norms: {unknown} cannot be absorbed; these can: {", ".join(possible)}')
    for name in stay:
        reasons[name] = KEPT_BY_CHOICE
        fusions[name] = replace(fusions[name], outcome='kept', into=(), reason=KEPT_BY_CHOICE)
    return fusions, reasons


def _plan_blocks(model: nn.Module, calls: list[Probe], steps: Sequence[Step]) -> dict[str, list[Step]]:
    """The steps of each block in the order of the forward: of norms by their input, of layers by the stream behind."""
    steps = [step for step in steps if not (isinstance(step, StreamStep) and is_shared(model, step.name, calls))]
    # Stream layers first: a norm that reads the stream is fitted after the layer that writes it.
    reached = [(step.target, step) for step in steps if isinstance(step, StreamStep)]
    reached += [(step.source, step) for step in steps if not isinstance(step, StreamStep)]
    blocks: dict[str, list[Step]] = {}
    # A module that a forward calls twice has more than one stream.
    for probe in (probe for probe in calls if calls.count(probe) == 1):
        for step in (step for at, step in reached if at == probe):
            blocks.setdefault(_find_block(model, step.name), []).append(step)
    return blocks


def _why_not_absorbable(model: nn.Module, name: str, norm: nn.LayerNorm, calls: list[Probe]) -> str:
    """Why a LayerNorm cannot be absorbed, regardless of the layers that read it; '' if it can."""
    if not is_in_backbone(model, name):
        # Absorption does not run the heads.
        return 'it is not in the backbone'
    count = calls.count(Probe(name, 'input'))
    reason = reason_to_keep(name, norm, model.get_submodule(name.rpartition('.')[0]))
    return reason or ('' if count == 1 else f'a forward calls it {count} times')


def _check_absorbable(model: nn.Module) -> None:
    check_fusible(model)
    for name, module in model.named_modules():
        # The rules of a block name the layers inside its attention, whose inputs only slab_det's attention shows.
        if (reason := why_not_adopted(module)) and type(module) in MMDET_ATTENTIONS:
            raise ConversionError(f'{name}: {reason}; the inputs of its layers cannot be captured')


def _find_block(model: nn.Module, name: str) -> str:
    """The block of a norm or layer: the outermost module around it that has rules for its norms or its stream layers.

    Each convolution of a neck is a block of its own, because none reads the output of another.
    """
    for container in ['', *containers_of(name)] if is_in_backbone(model, name) else []:
        module = model.get_submodule(container)
        if not find_rule(module, 'output_folds') and (find_rule(module, 'folds') or find_rule(module, 'writes')):
            return container
    return name
