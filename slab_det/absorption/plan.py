"""The plan of an absorption: which norms and layers are fitted, and in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import slab_det
from slab_det.absorption.absorption_report import KEPT_BY_CHOICE
from slab_det.absorption.images import Images, read_images, to_bytes
from slab_det.absorption.walk import Probe, find_reads, register_probe
from slab_det.backbones.adopt import MMDET_ATTENTIONS, why_not_adopted
from slab_det.families import find_absorbed
from slab_det.fusion.channels import HiddenChannels, find_channels
from slab_det.fusion.fuse import check_fusible, containers_of, join_names, plan_folds, reason_to_keep
from slab_det.fusion.fusion_report import NormFusion
from slab_det.norms import named_norms
from slab_det.norms.folds import Write, find_hooks, find_rule
from slab_det.runtime.errors import ConversionError
from slab_det.runtime.record import describe_environment


class Step(NamedTuple):
    """One fit: of a LayerNorm to absorb, of a layer that writes the residual stream or reads channels in a head, or of
    queries and keys.

    Attributes:
        name: The norm, the layer, or the attention whose queries and keys get a lower rank.
        source: Place of the regression's input: the input of the norm or of the layer; the tokens of the queries.
        target: Place of the tensor to approximate: the output of the norm, or the stream behind the layer. For queries
            and keys, the tokens of the keys.
        place: Name of the place whose hidden channels the layer or the attention has, or ''.
        finishes: Name of the module whose output no later step changes, so that it can be stored: the block, a
            branch of it such as an attention, or ''.
    """

    name: str
    source: Probe
    target: Probe
    place: str = ''
    finishes: str = ''


@dataclass
class AbsorptionPlan:
    """The part of an absorption that is the same for every choice of norms to keep: the steps and the images.

    Attributes:
        model: The teacher.
        images: See :class:`Images`.
        folder: Takes the finished blocks of students.
        int8: See :func:`slab_det.absorb`.
        forward: For a teacher or student, returns the function that runs it on the image tensor of a batch and the
            index of the batch, up to the last block.
        fusions: The layers that each norm is folded into if it is absorbed, by the name of the norm.
        reasons: Why each LayerNorm has to stay, or '', by the name of the norm.
        blocks: The steps of each block in the order of the forward, by the name of the block.
        reads: See :class:`slab_det.absorption.walk.Walk`.
        digest: Digest of all that determines a fit: images, the teacher's weights and settings, the plan and the code.
        own: :attr:`NormAbsorption.own` of each norm that a student has measured; it is the same for all students.
    """

    model: nn.Module
    images: Images
    folder: Path
    int8: bool
    forward: Callable[[nn.Module], Callable[[Tensor, int], object]]
    fusions: dict[str, NormFusion]
    reasons: dict[str, str]
    blocks: dict[str, list[Step]]
    reads: dict[str, set[str]]
    digest: hashlib._Hash
    own: dict[str, float] = field(default_factory=dict)

    def shorten(self, count: int) -> AbsorptionPlan:
        """Returns the plan with only the first ``count`` batches; itself if there are no more."""
        if self.images.count <= count:
            return self
        digest = self.digest.copy()
        digest.update(f'{count} batches'.encode())
        return replace(self, images=self.images._replace(count=count), digest=digest, own={})


def make_plan(
    model: nn.Module, batches: Iterable, folder: Path, int8: bool = False, channels: str = '', norms: bool = True
) -> AbsorptionPlan:
    """Reads the images, and runs the model to find the order of the steps and what each block reads.

    See :func:`slab_det.absorb` for the other arguments and for the errors.

    Args:
        model: The teacher, in eval mode.
        folder: Folder for temporary files.
        channels: Where hidden channels may be removed: '', 'ffn' or 'everywhere'.
        norms: Whether norms may be absorbed.
    """
    family = find_absorbed(model) if channels == 'everywhere' else None
    heads = family is not None
    images = read_images(model, batches, folder, heads)
    _check_absorbable(model)
    places = find_channels(model) if channels else {}
    writers, layer_norms = _find_writers(model, places), dict(named_norms(model, nn.LayerNorm))
    ranks = [Step(name, *starmap(Probe, place.tokens), name) for name, place in places.items() if place.tokens]
    head_steps = _find_head_steps(model, places) if heads else {}
    # A video detector has no extract_feat, so there is no known way to run its neck.
    has_neck = hasattr(model, 'extract_feat') and not all(step.name.startswith(_prefix(model)) for step in writers)

    def forward(net: nn.Module) -> Callable[[Tensor, int], object]:
        run = net.extract_feat if has_neck or heads else net.backbone if _prefix(net) else net
        return lambda image, batch: family.run_heads(net, run(image), images.regions[batch]) if heads else run(image)

    image = images.store.get('0')
    steps = [Step(name, Probe(name, 'input'), Probe(name, 'output')) for name in layer_norms]
    calls = _trace(model, forward(model), image, [*steps, *ranks, *writers])
    reasons = {name: _why_not_absorbable(model, name, norm, calls) for name, norm in layer_norms.items()}
    if not norms:
        reasons = {name: reason or KEPT_BY_CHOICE for name, reason in reasons.items()}
    candidates = [layer_norms[name] for name, reason in reasons.items() if not reason]
    fusions = {fusion.norm: fusion for fusion in plan_folds(model, candidates)}
    reasons = {name: reason or fusions[name].reason for name, reason in reasons.items()}
    steps = [step for step in steps if not reasons[step.name]]
    if not steps and not head_steps and not any(writer.place for writer in writers):
        why = '; '.join(dict.fromkeys(reasons.values())) or 'it has none'
        raise ConversionError(
            f'the model has no LayerNorm that can be absorbed: {why}; give a detector with LayerNorm, '
            'or ffn=0.75 to remove hidden channels'
        )
    writers = [writer for writer in writers if not _is_shared(model, writer.name, calls)]
    blocks = _order_steps(model, calls, [*steps, *ranks], writers)
    map_steps = _find_map_steps(places, blocks) if head_steps else {}
    for block, step in map_steps.items():
        blocks[block].append(step)
    blocks |= head_steps
    reads = find_reads(model, forward(model), blocks, image)
    for block, parts in blocks.items():
        reads[block] |= {step.finishes for step in parts} - {block}
    for step in map_steps.values():
        # Before the heads, in order: the maps that they read, and nothing from which convolutions compute maps.
        maps = set().union(*(reads[head] for head in head_steps))
        reads = {name: reads[name] for name in reads if name not in head_steps} | {step.place: maps} | reads
    digest = images.digest.copy()
    digest.update(repr((fusions, int8, blocks, _settings(model), describe_environment()['versions'])).encode())
    digest.update(source_digest(Path(slab_det.__file__).parent))
    for name, value in model.state_dict().items():
        digest.update(f'{name} {value.dtype} {tuple(value.shape)}'.encode() + to_bytes(value))
    return AbsorptionPlan(model, images, folder, int8, forward, fusions, reasons, blocks, reads, digest)


def source_digest(package: Path) -> bytes:
    """Digest of the source of a package: another commit of the same version may make other fits."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob('*.py')):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.digest()


def _settings(model: nn.Module) -> list[tuple]:
    """What modules hold beside weights, such as eps, heads and window sizes: their types, numbers and words."""

    def is_plain(value: object) -> bool:
        return all(map(is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float, str))

    # Private attributes are caches and flags, which may change between two calls.
    return [
        (name, type(module).__qualname__, key, repr(value))
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if not key.startswith('_') and is_plain(value)
    ]


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


def _find_writers(model: nn.Module, places: Mapping[str, HiddenChannels]) -> list[Step]:
    """The steps of the layers that write the residual stream, and of the convolutions of the neck."""
    # A place with layers that keep all channels may lose these when norms are absorbed, so it counts too.
    owners = {
        layer: place.name for place in places.values() if not place.maps for layer in place.readers or (place.owner,)
    }
    writers: dict[str, Step] = {}
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
            writers[layer] = Step(layer, source, target, *found[-1:])
    return [*writers.values()]


def _find_head_steps(model: nn.Module, places: Mapping[str, HiddenChannels]) -> dict[str, list[Step]]:
    """The steps of the readers of hidden channels in the heads, by the name of the head, which is a block."""
    blocks: dict[str, list[Step]] = {}
    for place in places.values():
        if not place.name.startswith(_prefix(model)) and place.readers and not place.maps:
            blocks.setdefault(place.owner, []).append(_own_step(place.readers[0], place.name)._replace(name=place.name))
    # The layers that read the maps of the neck come first.
    for place in (place for place in places.values() if place.maps):
        for block, steps in blocks.items():
            readers = [reader for reader in place.readers if reader.startswith(f'{block}.')]
            steps[:0] = [_own_step(reader, place.name) for reader in readers]
    return {block: [*steps[:-1], steps[-1]._replace(finishes=block)] for block, steps in blocks.items()}


def _own_step(layer: str, place: str = '') -> Step:
    """The step of a layer that is fitted to its own output."""
    return Step(layer, Probe(layer, 'input'), Probe(layer, 'output'), place)


def _find_map_steps(places: Mapping[str, HiddenChannels], blocks: Mapping[str, list[Step]]) -> dict[str, Step]:
    """The steps of channels of a neck's maps, each by the last block that writes some: the blocks are convolutions."""
    steps = {}
    for place in places.values():
        if place.maps and (found := [writer for writer in blocks if writer in place.writers]):
            probe = Probe(found[-1], 'output')
            steps[found[-1]] = Step(place.name, probe, probe, place.name)
    return steps


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


def _trace(
    model: nn.Module, forward: Callable[[Tensor, int], object], image: Tensor, steps: Iterable[Step]
) -> list[Probe]:
    """Runs the model once and returns the places of the steps in the order in which the forward reaches them."""
    calls: list[Probe] = []
    probes = {}
    for step in steps:
        branch = Probe(_find_branch(model, step.name), 'output')
        probes |= dict.fromkeys([step.source, step.target, Probe(step.name, 'output'), branch])
    with ExitStack() as stack, torch.no_grad():
        for probe in probes:
            module = model.get_submodule(probe.module)
            stack.callback(register_probe(module, probe.side, lambda value, at=probe: calls.append(at)).remove)
        forward(image, 0)
    return calls


def _is_shared(model: nn.Module, layer: str, calls: list[Probe]) -> bool:
    """Whether a layer is called twice or shares weights, so that fits for several places would undo each other."""
    parameters = [p for module in model.modules() for p in module._parameters.values()]
    own = {*map(id, model.get_submodule(layer).parameters())}
    return calls.count(Probe(layer, 'output')) > 1 or sum(id(p) in own for p in parameters) > len(own)


def _order_steps(
    model: nn.Module, calls: list[Probe], norms: Sequence[Step], writers: Sequence[Step]
) -> dict[str, list[Step]]:
    """The steps of each block in the order of the forward: norms, and queries and keys, by their input, and writers by
    the stream behind them."""
    blocks: dict[str, list[Step]] = {}
    # Writers first: a norm that reads the stream is fitted after the layer that writes it.
    places = [*((step.target, step) for step in writers), *((step.source, step) for step in norms)]
    # A module that a forward calls twice has more than one stream.
    for probe in (probe for probe in calls if calls.count(probe) == 1):
        for step in (step for place, step in places if place == probe):
            blocks.setdefault(_find_block(model, step.name), []).append(step)
    for block, steps in blocks.items():
        for index, step in enumerate(steps):
            if step in writers and _has_returned(model, step, steps[index + 1 :], calls):
                steps[index] = step._replace(finishes=_find_branch(model, step.name))
        steps[-1] = steps[-1]._replace(finishes=block)
    return blocks


def _has_returned(model: nn.Module, writer: Step, later: Iterable[Step], calls: list[Probe]) -> bool:
    """Whether the branch of a writer returns before its stream is reached and before later steps read their inputs.

    Then the branch, such as an attention, need not run again for later steps; see :class:`slab_det.fusion.Write`.
    """
    branch = Probe(_find_branch(model, writer.name), 'output')
    if writer.target.side == 'output' or calls.count(branch) != 1 or find_hooks(model.get_submodule(branch.module)):
        return False
    before = calls[: calls.index(branch)]
    return writer.target not in before and not any(step.source in before for step in later)
