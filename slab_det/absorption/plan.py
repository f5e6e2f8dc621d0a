"""What an absorption fits, in which order, and the images that it reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.absorption.report import KEPT_BY_CHOICE
from slab_det.absorption.walk import Probe, TensorStore, last_uses, register_probe
from slab_det.fusion.folds import CannotFold, Write, find_hooks, find_rule
from slab_det.fusion.fuse import check_fusible, containers_of, join_names, plan_folds
from slab_det.fusion.layer_norms import describe_others, reason_to_keep
from slab_det.norms import named_norms
from slab_det.recalibration.moments import one_pass, prepare_inputs
from slab_det.runtime.errors import ConversionError

# Every so many batches one is held out: it chooses ridges and measures what is left.
HELD_OUT = 5


class Batches(list):
    """Batches of one pass over a data loader: another pass may draw other images.

    Attributes:
        dataset: That of the loader, or None; it says how batches are prepared.
    """

    dataset: object = None


class Images:
    """The images of an absorption; those that are held out stay in memory as they came.

    Args:
        model: The teacher, which prepares them.
        batches: What a data loader yields, or image tensors (B, 3, H, W).
        folder: For image tensors that find no place in memory.

    Attributes:
        store: Has the image tensor of each batch, by its index.
        count: How many batches there are.
        held_out: Every fifth batch, or all where there are fewer than five, as they came.
        digest: Of the image tensors.

    Raises:
        ConversionError: If there is no batch.
    """

    def __init__(self, model: nn.Module, batches: Iterable, folder: Path) -> None:
        self.store, self.count = TensorStore(folder, next(model.parameters()).device), 0
        self.held_out, few = Batches(), []
        self.held_out.dataset = getattr(batches, 'dataset', None)
        self.digest = hashlib.sha256()
        prepare = prepare_inputs(model, batches)
        for index, batch in enumerate(one_pass(batches)):
            inputs = prepare(batch)[0]
            self.store.put(str(index), inputs)
            self.count += 1
            self.digest.update(to_bytes(inputs))
            if self.is_held_out(index):
                self.held_out.append(batch)
            elif index < HELD_OUT:
                few.append(batch)
        if not self.count:
            raise ConversionError('there was no batch of images; check the dataset and its filter_cfg')
        if not self.held_out:
            self.held_out.extend(few)
            MMLogger.get_current_instance().warning(
                f'{len(few)} batches: none is held out, so agreement and what norms leave are those of images that '
                f'were fitted; give at least {HELD_OUT} batches, smaller ones or more'
            )

    def is_held_out(self, index: int) -> bool:
        """Whether no fit sees batch ``index``."""
        return index % HELD_OUT == HELD_OUT - 1


class Writer(NamedTuple):
    """A layer that writes the residual stream, where the new stream is seen, what the layer reads, and its FFN."""

    layer: str
    stream: Probe
    source: Probe
    ffn: str = ''


class AbsorptionPlan:
    """What is fitted, in which order, and the images: all that does not depend on the norms to keep.

    Attributes:
        model: The teacher.
        int8: Fits must bear that what they read is rounded to int8.
        ffn: Share of the hidden channels that each FFN loses.
        images: See :class:`Images`.
        digest: Digest of the images, the teacher's weights, the fusions and the steps.
        fusions: Where each norm goes if it is absorbed, by its name.
        reasons: Why each LayerNorm has to stay, or '', by its name.
        units: Names of the modules that hold norms and writers, in the order in which they return.
        steps: For each unit the norms, by name, and writers to fit, in the order of their calls.
        runs_neck: Whether forwards go on to the neck, which has writers.
        last_uses: See :class:`slab_det.absorption.walk.Walk`.
        own: For each norm that a student has measured :attr:`NormAbsorption.own`, which is the same for all students.
        states: What students had at the end of each unit, by :meth:`slab_det.absorption.student.Absorption._prefix`.
        folder: For temporary files.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable,
        folder: Path,
        fold_outputs: bool = False,
        int8: bool = False,
        ffn: float = 0.0,
        norms: bool = True,
    ) -> None:
        self.model, self.folder, self.int8, self.ffn = model, folder, int8, ffn
        self.own: dict[str, float] = {}
        self.states: dict[tuple[int, frozenset[str]], dict] = {}
        self.images = Images(model, batches, folder)
        self.digest = self.images.digest.copy()
        check_fusible(model)
        for name, module in model.named_modules():
            if replace := find_rule(module, 'replace'):
                if any(map(find_hooks, module.modules())):
                    raise ConversionError(f'{name}: it has hooks, which would be lost; remove them before absorbing')
                try:
                    replace()
                except CannotFold as reason:
                    raise ConversionError(f'{name}: {reason}; what its layers read cannot be seen') from reason
        # Norms of neck and heads are not on the way.
        self.root = 'backbone.' if isinstance(getattr(model, 'backbone', None), nn.Module) else ''
        image = self.images.store.get('0')
        writers = {writer.layer: writer for writer in self._find_writers()}.values()
        # A video detector has no extract_feat: nothing is known to run its neck.
        self.runs_neck = hasattr(model, 'extract_feat') and any(not w.layer.startswith(self.root) for w in writers)
        reasons = self._find_reasons()
        calls = self._trace(image, writers, reasons)
        for name in reasons:
            if not norms:
                reasons[name] = reasons[name] or KEPT_BY_CHOICE
            if not reasons[name] and calls.count(name) != 1:
                reasons[name] = f'a forward calls it {calls.count(name)} times'
        candidates = {model.get_submodule(name) for name, reason in reasons.items() if not reason}
        self.fusions = {fusion.norm: fusion for fusion in plan_folds(model, fold_outputs, candidates)}
        self.digest.update(repr((self.fusions, int8, ffn)).encode())
        for name, value in model.state_dict().items():
            self.digest.update(name.encode() + to_bytes(value))
        self.reasons = {name: reason or self.fusions[name].reason for name, reason in reasons.items()}
        if all(self.reasons.values()) and not (ffn and any(writer.ffn for writer in writers)):
            others = describe_others(model, self.reasons)
            raise ConversionError(f'the model has no LayerNorm that can be absorbed{others}')
        # A module that a forward calls twice has more than one stream.
        once = [place for place in calls if calls.count(place) == 1]
        steps: dict[str, list[Writer | str]] = {}
        for step in once:
            if isinstance(step, Writer):
                is_fitted = not self._is_shared(step.layer, calls)
            else:
                is_fitted = self.reasons.get(step) == ''
            if is_fitted:
                steps.setdefault(self._find_unit(step), []).append(step)
        parts = [part for unit in steps for part in self._split(unit, steps[unit], once)]
        self.units, self.steps = [unit for unit, _ in parts], [part for _, part in parts]
        self.digest.update(repr(parts).encode())
        self.last_uses = last_uses(model, self.forward(model), self.units, image)

    def _find_reasons(self) -> dict[str, str]:
        """Why each LayerNorm of the model has to stay, or ''."""
        reasons = {}
        for name, norm in named_norms(self.model, nn.LayerNorm):
            reason = reason_to_keep(name, norm, self.model.get_submodule(name.rpartition('.')[0]))
            reasons[name] = (reason or '') if name.startswith(self.root) else 'it is not in the backbone'
        return reasons

    def _find_writers(self) -> list[Writer]:
        writers: list[Writer] = []
        for prefix, module in self.model.named_modules():
            rule = find_rule(module, 'writes')
            # A block speaks for its FFN.
            if rule and not any(writer.layer.startswith(f'{prefix}.') for writer in writers):
                for write in rule():
                    layer, stream, source = (name and join_names(prefix, name) for name in Write(*write))
                    # A layer of its own stream, as an FPN's, is fitted to what it puts out.
                    seen = Probe(stream, 'input') if stream not in ('', layer) else Probe(stream or prefix, 'output')
                    source = Probe(source, 'output') if source else Probe(layer, 'input')
                    around = {name: self.model.get_submodule(name) for name in containers_of(layer)}
                    ffns = [name for name, module in around.items() if find_rule(module, 'ffn_layers')]
                    writers.append(Writer(layer, seen, source, *ffns[-1:]))
        return writers

    def _trace(self, image: Tensor, writers: Iterable[Writer], norms: Iterable[str]) -> list[Writer | str | Probe]:
        """The writers, the norms and the ends of branches and layers in the order in which a forward comes to them."""
        calls: list[Writer | str | Probe] = []
        ends = {Probe(w.layer, 'output') for w in writers} | {self._find_branch(w) for w in writers}
        # Where the new stream is the input of a norm, the writer is first.
        places = [
            *((writer, writer.stream) for writer in writers),
            *((name, Probe(name, 'input')) for name in norms),
            *((probe, probe) for probe in ends),
        ]
        with ExitStack() as stack, torch.no_grad():
            for place, probe in places:
                module = self.model.get_submodule(probe.module)
                stack.callback(register_probe(module, probe.side, lambda value, at=place: calls.append(at)).remove)
            self.forward(self.model)(image)
        return calls

    def _is_shared(self, layer: str, calls: list) -> bool:
        """Whether a layer has another place too, for which a fit would undo this one's."""
        parameters = [p for module in self.model.modules() for p in module._parameters.values()]
        own = {*map(id, self.model.get_submodule(layer).parameters())}
        return calls.count(Probe(layer, 'output')) > 1 or sum(id(p) in own for p in parameters) > len(own)

    def _find_unit(self, step: Writer | str) -> str:
        """The outermost module around a norm or layer, backbones excepted, that says where norms go or what writes."""
        name = step.layer if isinstance(step, Writer) else step
        for container in ['', *containers_of(name)]:
            module = self.model.get_submodule(container)
            if find_rule(module, 'output_folds') is None and (
                find_rule(module, 'folds') or find_rule(module, 'writes')
            ):
                return container
        return name

    def _find_branch(self, writer: Writer) -> Probe:
        """Where the child of a unit that holds a writer returns, such as the attention of a block."""
        unit = self._find_unit(writer)
        return Probe(join_names(unit, writer.layer[len(unit) :].strip('.').split('.')[0]) or unit, 'output')

    def _split(self, unit: str, steps: list[Writer | str], calls: list) -> Iterator[tuple[str, list[Writer | str]]]:
        """Units within a unit, with their steps, then the unit itself with the rest.

        What is a unit of its own need not run for what follows: an attention, behind which the block has a norm, and
        each convolution of an FPN.
        """
        if all(isinstance(step, Writer) and step.stream.module == step.layer for step in steps):
            yield from ((step.layer, [step]) for step in steps)
            return
        first = 0
        for index, step in enumerate(steps, 1):
            if (
                isinstance(step, Writer)
                and step.stream.side == 'input'
                and self._ends_early(unit, step, steps[index:], calls)
            ):
                yield self._find_branch(step).module, steps[first:index]
                first = index
        yield unit, steps[first:]

    def _ends_early(self, unit: str, writer: Writer, later: list[Writer | str], calls: list) -> bool:
        """Whether the branch of a writer has returned before the new stream, and no later step is in or before it."""
        branch = self._find_branch(writer)
        if branch.module == unit or branch not in calls or find_hooks(self.model.get_submodule(branch.module)):
            return False
        end = calls.index(branch)
        places = {step for step in later if isinstance(step, str)}
        for step in (step for step in later if isinstance(step, Writer)):
            places |= {step.layer, step.source.module, step.stream.module}
            if (other := self._find_branch(step)) in calls and calls.index(other) < end:
                return False
        inside = any(f'{place}.'.startswith(f'{branch.module}.') for place in places)
        return end < calls.index(writer) and not inside

    def forward(self, model: nn.Module) -> Callable[[Tensor], object]:
        """What runs a teacher or student on an image tensor."""
        if self.runs_neck:
            return model.extract_feat
        return model.backbone if self.root else model


def to_bytes(tensor: Tensor) -> bytes:
    """The values, for a digest."""
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
