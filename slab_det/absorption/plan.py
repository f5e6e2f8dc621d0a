"""The plan of an absorption: which norms and layers are fitted, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import starmap

import torch
from torch import Tensor, nn

from slab_det.absorption.absorption_report import KEPT_BY_CHOICE
from slab_det.absorption.images import Images
from slab_det.absorption.steps import HeadStep, MapReaderStep, MapStep, NormStep, RankStep, Step, WriterStep
from slab_det.absorption.walk import Probe, find_reads, register_probe
from slab_det.backbones.adopt import MMDET_ATTENTIONS, why_not_adopted
from slab_det.common.copying import copy_module
from slab_det.common.errors import ConversionError
from slab_det.families import find_absorbed
from slab_det.fusion.channels import ChannelUnit, find_channels
from slab_det.fusion.folding import apply_fold, check_fusible, containers_of, join_names, plan_folds, reason_to_keep
from slab_det.fusion.fusion_report import NormFusion
from slab_det.norms import named_norms
from slab_det.norms.folds import Write, find_hooks, find_rule

# Runs a model on the image tensor of a batch and the index of the batch, up to the last block.
Forward = Callable[[Tensor, int], object]
LayerStep = NormStep | RankStep | WriterStep


@dataclass(frozen=True)
class AbsorptionPlan:
    """The part of an absorption that is the same for every choice of channels: the steps and the images.

    Attributes:
        model: The teacher.
        images: See :class:`Images`.
        int8: See :func:`slab_det.absorb`.
        forward: Returns the forward of a teacher or student.
        fusions: The layers that each norm is folded into if it is absorbed, by the name of the norm.
        reasons: Why each LayerNorm stays, or '', by the name of the norm.
        blocks: The steps of each block in the order of the forward, by the name of the block.
        reads: See :class:`slab_det.absorption.walk.Walk`.
    """

    model: nn.Module
    images: Images
    int8: bool
    forward: Callable[[nn.Module], Forward]
    fusions: dict[str, NormFusion]
    reasons: dict[str, str]
    blocks: dict[str, list[Step]]
    reads: dict[str, set[str]]

    @property
    def steps(self) -> list[Step]:
        """The steps of all blocks."""
        return [step for steps in self.blocks.values() for step in steps]

    def copy_teacher(self) -> nn.Module:
        """A copy of the teacher with slab_det's own norms fused."""
        model = copy_module(self.model)
        for fusion in self.fusions.values():
            if fusion.outcome != 'absorbed':
                apply_fold(model, fusion)
        return model


def make_plan(
    model: nn.Module, images: Images, channels: bool, norms: str | Collection[str], int8: bool = False
) -> AbsorptionPlan:
    """Runs the model to find the order of the steps and what each block reads.

    See :func:`slab_det.absorb` for the other arguments and for the errors.

    Args:
        model: The teacher, in eval mode.
        images: Its images.
        channels: Whether hidden channels may be removed.
    """
    _check_absorbable(model)
    units = find_channels(model) if channels else {}
    family = find_absorbed(model) if images.regions else None
    layers = [NormStep(name=name) for name, _ in named_norms(model, nn.LayerNorm)]
    layers += [_rank_step(unit) for unit in units.values() if unit.tokens]
    layers += _find_writers(model, units)
    # A video detector has no extract_feat, so there is no known way to run its neck.
    has_neck = hasattr(model, 'extract_feat') and not all(
        layer.name.startswith(_prefix(model)) for layer in layers if isinstance(layer, WriterStep)
    )

    def forward(net: nn.Module) -> Forward:
        run = net.extract_feat if has_neck or family else net.backbone if _prefix(net) else net
        return lambda image, batch: family.run_heads(net, run(image), images.regions[batch]) if family else run(image)

    run, image = forward(model), images.store.get('0')
    calls = _trace(model, run, image, layers)
    fusions, reasons = _plan_norms(model, calls, norms)
    steps = [layer for layer in layers if not (isinstance(layer, NormStep) and reasons[layer.name])]
    blocks = _plan_blocks(model, calls, steps, units if family else {})
    if not any(isinstance(step, NormStep) or step.unit for steps in blocks.values() for step in steps):
        why = '; '.join(dict.fromkeys(reasons.values())) or 'it has none'
        raise ConversionError(
            f'the model has no LayerNorm that can be absorbed: {why}; give a detector with LayerNorm, fewer names of '
            'norms that stay, or channels=0.5 to remove hidden channels'
        )
    reads = _plan_reads(model, run, blocks, image)
    return AbsorptionPlan(model, images, int8, forward, fusions, reasons, blocks, reads)


def _plan_norms(
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


def _plan_blocks(
    model: nn.Module, calls: list[Probe], steps: Sequence[LayerStep], units: Mapping[str, ChannelUnit]
) -> dict[str, list[Step]]:
    """The steps of each block in the order of the forward: of norms, and of queries and keys, by their input, and of
    writers by the stream behind them; then the steps of neck and heads for ``units``."""
    steps = [step for step in steps if not (isinstance(step, WriterStep) and _is_shared(model, step.name, calls))]
    # Writers first: a norm that reads the stream is fitted after the layer that writes it.
    reached = [(step.target, step) for step in steps if isinstance(step, WriterStep)]
    reached += [(step.source, step) for step in steps if not isinstance(step, WriterStep)]
    blocks: dict[str, list[Step]] = {}
    # A module that a forward calls twice has more than one stream.
    for probe in (probe for probe in calls if calls.count(probe) == 1):
        for step in (step for at, step in reached if at == probe):
            blocks.setdefault(_find_block(model, step.name), []).append(step)
    for block, found in blocks.items():
        for index, step in enumerate(found):
            if isinstance(step, WriterStep) and _has_returned(model, step, found[index + 1 :], calls):
                found[index] = replace(step, finishes=_find_branch(model, step.name))
        found[-1] = replace(found[-1], finishes=block)
    heads = _find_head_steps(model, units)
    for unit in (unit for unit in units.values() if unit.maps and heads):
        # Each convolution of the neck is a block. The last one has the step of all maps.
        if writers := [writer for writer in blocks if writer in unit.writers]:
            blocks[writers[-1]].append(MapStep(name=unit.name, unit=unit.name))
    return blocks | heads


def _plan_reads(
    model: nn.Module, run: Forward, blocks: Mapping[str, Sequence[Step]], image: Tensor
) -> dict[str, set[str]]:
    """What each block reads; see :class:`slab_det.absorption.walk.Walk`."""
    reads = find_reads(model, run, blocks, image)
    for block, steps in blocks.items():
        reads[block] |= {step.finishes for step in steps} - {block, ''}
    heads = [block for block, steps in blocks.items() if isinstance(steps[-1], HeadStep)]
    for step in (step for steps in blocks.values() for step in steps if isinstance(step, MapStep)):
        # Before the heads, in order: the maps that they read, and nothing from which convolutions compute maps.
        maps = set().union(*(reads[head] for head in heads))
        reads = {name: reads[name] for name in reads if name not in heads} | {step.name: maps} | reads
    return reads


def _prefix(model: nn.Module) -> str:
    """The prefix of the backbone's module names: 'backbone.' in a detector, '' in a backbone."""
    return 'backbone.' if isinstance(getattr(model, 'backbone', None), nn.Module) else ''


def _why_not_absorbable(model: nn.Module, name: str, norm: nn.LayerNorm, calls: list[Probe]) -> str:
    """Why a LayerNorm cannot be absorbed, regardless of the layers that read it; '' if it can."""
    if not name.startswith(_prefix(model)):
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


def _rank_step(unit: ChannelUnit) -> RankStep:
    queries, keys = starmap(Probe, unit.tokens)
    return RankStep(name=unit.name, unit=unit.name, source=queries, target=keys)


def _find_writers(model: nn.Module, units: Mapping[str, ChannelUnit]) -> list[WriterStep]:
    """The steps of the layers that write the residual stream, and of the convolutions of the neck."""
    # A unit between layers that keep all channels may lose these when norms are absorbed, so it counts too.
    owners = {layer: unit.name for unit in units.values() if not unit.maps for layer in unit.readers or (unit.owner,)}
    writers: dict[str, WriterStep] = {}
    for prefix, module in model.named_modules():
        rule = find_rule(module, 'writes')
        # The rule of a block counts, not the rule of the FFN in it.
        if not rule or any(layer.startswith(f'{prefix}.') for layer in writers):
            continue
        for write in rule():
            layer, stream, source = (name and join_names(prefix, name) for name in Write(*write))
            # A layer that is its own stream, such as a convolution of an FPN, is fitted to its output.
            target = Probe(stream, 'input') if stream not in ('', layer) else Probe(stream or prefix, 'output')
            source = Probe(source, 'output') if source else Probe(layer, 'input')
            found = [owners[name] for name in (*containers_of(layer), layer) if name in owners]
            writers[layer] = WriterStep(name=layer, unit=found[-1] if found else '', source=source, target=target)
    return [*writers.values()]


def _find_head_steps(model: nn.Module, units: Mapping[str, ChannelUnit]) -> dict[str, list[Step]]:
    """The steps of the readers of hidden channels in the heads, by the name of the head, which is a block."""
    blocks: dict[str, list[Step]] = {}
    for unit in units.values():
        if not unit.name.startswith(_prefix(model)) and unit.readers and not unit.maps:
            blocks.setdefault(unit.owner, []).append(HeadStep(name=unit.name, unit=unit.name))
    # The layers that read the maps of the neck come first.
    for unit in (unit for unit in units.values() if unit.maps):
        for block, steps in blocks.items():
            readers = [reader for reader in unit.readers if reader.startswith(f'{block}.')]
            steps[:0] = [MapReaderStep(name=reader, unit=unit.name) for reader in readers]
    for block, steps in blocks.items():
        steps[-1] = replace(steps[-1], finishes=block)
    return blocks


def _find_block(model: nn.Module, name: str) -> str:
    """The block of a norm or layer: the outermost module around it that has rules for its norms or its writers.

    Each convolution of a neck is a block of its own, because none reads the output of another.
    """
    for container in ['', *containers_of(name)] if name.startswith(_prefix(model)) else []:
        module = model.get_submodule(container)
        if not find_rule(module, 'output_folds') and (find_rule(module, 'folds') or find_rule(module, 'writes')):
            return container
    return name


def _find_branch(model: nn.Module, name: str) -> str:
    """The child of the block that contains a norm or layer, such as an attention; the block itself if there is none."""
    block = _find_block(model, name)
    return join_names(block, name[len(block) :].strip('.').partition('.')[0]) or block


def _trace(model: nn.Module, run: Forward, image: Tensor, steps: Iterable[LayerStep]) -> list[Probe]:
    """Runs the model once and returns the probes of the steps in the order in which the forward reaches them."""
    calls: list[Probe] = []
    probes = {}
    for step in steps:
        branch = Probe(_find_branch(model, step.name), 'output')
        probes |= dict.fromkeys([step.source, step.target, Probe(step.name, 'output'), branch])
    with ExitStack() as stack, torch.no_grad():
        for probe in probes:
            module = model.get_submodule(probe.module)
            stack.callback(register_probe(module, probe.side, lambda value, at=probe: calls.append(at)).remove)
        run(image, 0)
    return calls


def _is_shared(model: nn.Module, layer: str, calls: list[Probe]) -> bool:
    """Whether a layer is called twice or shares weights, so that its fits would undo each other."""
    parameters = [p for module in model.modules() for p in module._parameters.values()]
    own = {*map(id, model.get_submodule(layer).parameters())}
    return calls.count(Probe(layer, 'output')) > 1 or sum(id(p) in own for p in parameters) > len(own)


def _has_returned(model: nn.Module, writer: WriterStep, later: Iterable[LayerStep], calls: list[Probe]) -> bool:
    """Whether the branch of a writer returns before its stream is reached and before later steps read their inputs.

    Then the branch, such as an attention, need not run again for later steps; see :class:`slab_det.fusion.Write`.
    """
    branch = Probe(_find_branch(model, writer.name), 'output')
    if writer.target.side == 'output' or calls.count(branch) != 1 or find_hooks(model.get_submodule(branch.module)):
        return False
    before = calls[: calls.index(branch)]
    return writer.target not in before and not any(step.source in before for step in later)
