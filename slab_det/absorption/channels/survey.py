"""The survey of an absorption: what hidden channels save and cost, and how many stay for a number of multiply-adds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport, ChannelAbsorption
from slab_det.absorption.channels.estimates import Estimates, Price, estimate_losses, layer_kind
from slab_det.absorption.channels.judge import Judge
from slab_det.absorption.channels.observed import Observed, Observer
from slab_det.absorption.channels.pruning import prune_channels
from slab_det.absorption.images import WHOLE, is_held_out
from slab_det.absorption.probes import is_in_backbone
from slab_det.common.errors import ConversionError
from slab_det.common.modules import copy_module
from slab_det.compare.ruler import RetainedAP
from slab_det.fusion.channels import ChannelUnit
from slab_det.measure.cost import LayerCosts, count_multiply_adds

# Most batches that are observed.
OBSERVED = 64


class Half(NamedTuple):
    """Some batches, and what the teacher computes in them around each unit, by its name."""

    batches: Sequence[int]
    observed: Mapping[str, Observed]


class Survey:
    """The units of a detector, the losses they would bring, and the multiply-adds of the layers.

    Args:
        observer: Looks at the units of the teacher.
        progress: Show progress bars.

    Attributes:
        halves: Of the batches that are fitted. A draft is fitted on one and judged on the other.
        estimates: Of each unit, by its name.
        kinds: The names of the units of each kind of layers, by its name; see :func:`layer_kind`.
        prices: Of each kind, by its name.
        total: Multiply-adds of the first batch, whole, in the backbone, the neck and the heads that absorption runs.
        alone: Why all channels of the other units stay, by the name of the unit.
        layers: For each layer that reads or writes hidden channels: its multiply-adds, and the names of the units that
            it reads and writes.
    """

    def __init__(self, observer: Observer, progress: bool = False) -> None:
        self.observer, self.progress = observer, progress
        teacher, images = observer.model, observer.images
        with LayerCosts() as costs:
            self.total = self.count(teacher)
        batches = [batch for batch in range(images.count) if not is_held_out(batch)][:OBSERVED]
        halves = batches[::2], batches[1::2] or batches
        self.halves = [Half(some, observer.observe(some, progress)) for some in halves]
        found = {name: self._estimate_unit(unit) for name, unit in observer.units.items()}
        self.estimates = {name: estimates for name, estimates in found.items() if estimates}
        unknown = 'too few tokens or regions of the images reach it; give more images'
        self.alone = observer.reasons | {name: unknown for name in found if name not in self.estimates}
        self.kinds: dict[str, list[str]] = defaultdict(list)
        for name, estimates in self.estimates.items():
            self.kinds[layer_kind(teacher, estimates.unit)].append(name)
        self.prices = dict.fromkeys(self.kinds, Price())
        self.layers: dict[str, tuple[float, list[str]]] = {}
        for name, estimates in self.estimates.items():
            unit = estimates.unit
            for layer in (*unit.writers, *unit.between, *unit.readers):
                cost, names = self.layers.setdefault(layer, (costs.of(teacher.get_submodule(layer)), []))
                names.append(name)

    def _estimate_unit(self, unit: ChannelUnit) -> Estimates | None:
        first, second = (half.observed[unit.name] for half in self.halves)
        # A draft is fitted on the tokens of one half.
        if not all(part.count for part in (*first.channels, *second.channels)):
            return None
        return estimate_losses(self.observer.model, unit, first.merge(second))

    def estimate(self, counts: Mapping[str, int]) -> float:
        """The sum of the estimated losses of some units with these numbers of channels."""
        found = (self.estimates[name] for name in counts)
        return sum(each.losses[each.counts.index(counts[each.unit.name])] for each in found)

    def make_draft(self, counts: Mapping[str, int], half: Half) -> nn.Module:
        """A student with these numbers of channels, fitted on half of the images."""
        draft = copy_module(self.observer.model)
        prune_channels(draft, counts, half.observed.__getitem__, self._orders)
        return draft

    def prune(self, student: nn.Module, counts: Mapping[str, int], report: AbsorptionReport) -> dict[str, Tensor]:
        """Leaves these numbers of channels in a copy of the teacher, fitted on both halves, and adds to the report.

        Returns:
            What the channels of the maps now are, combinations of those before, (K, C), by the name of each layer that
            writes a map.
        """
        first, second = (half.observed for half in self.halves)
        pruned = prune_channels(student, counts, lambda name: first[name].merge(second[name]), self._orders)
        maps = {}
        for name, estimates in self.estimates.items():
            if name in pruned:
                error, encoder = pruned[name]
                report.channels.append(ChannelAbsorption(name, estimates.unit.count, counts[name], error=error))
                maps.update(dict.fromkeys(() if encoder is None else estimates.unit.writers, encoder))
        report.channels += [ChannelAbsorption(name, reason=reason) for name, reason in self.alone.items()]
        report.multiply_adds = self.total, self.count(student)
        return maps

    @property
    def _orders(self) -> dict[str, Tensor]:
        return {name: found.order for name, found in self.estimates.items() if found.order is not None}

    def judge_draft(self, judge: Judge, counts: Mapping[str, int]) -> RetainedAP:
        """Judges drafts with these numbers of channels, each on batches that it is not fitted on."""
        first, second = (self.make_draft(counts, half) for half in self.halves)
        students = {batch: second if batch in self.halves[0].batches else first for batch in judge.batches}
        return judge.measure(students, same_maps=all(map(self._is_in_head, counts)))

    def _is_in_head(self, name: str) -> bool:
        """Whether a unit is in a head, so that backbone and neck compute the same maps without its channels."""
        return not (self.estimates[name].unit.maps or is_in_backbone(self.observer.model, name))

    def multiply_adds(self, counts: Mapping[str, int], layers: Iterable[str] = ()) -> float:
        """The multiply-adds with these numbers of channels, of the whole detector or of some layers."""

        def share(name: str) -> float:
            unit = self.estimates[name].unit
            return counts.get(name, unit.count) / unit.count

        parts = {layer: self.layers[layer] for layer in layers or self.layers}
        rest = 0 if layers else self.total - sum(cost for cost, _ in parts.values())
        return rest + sum(cost * math.prod(map(share, names)) for cost, names in parts.values())

    def choose(self, share: float) -> dict[str, int]:
        """The numbers of channels to leave, by unit, so that this share of the multiply-adds is left.

        One after another, the channels go that cost least for each multiply-add that they save.

        Raises:
            ConversionError: If more multiply-adds are left with the fewest channels everywhere.
        """
        if share < self.least_share():
            alone = '; '.join(f'{name} keeps all: {reason}' for name, reason in [*self.alone.items()][:3])
            raise ConversionError(
                f'channels={share:g}: with the fewest channels everywhere {self.least_share():.2f} of the '
                f'multiply-adds are left; give a larger share{f" ({alone})" if alone else ""}'
            )
        return self.counts_for(share * self.total, [*self.estimates])

    def counts_for(self, most: float, names: Sequence[str]) -> dict[str, int]:
        """The numbers of channels to leave in some units, so that at most ``most`` multiply-adds are left."""
        at, counts, spent = dict.fromkeys(names, 0), {}, dict.fromkeys(self.kinds, 0.0)
        layers = {name: [layer for layer, (_, found) in self.layers.items() if name in found] for name in names}
        kind_of = {name: kind for kind, found in self.kinds.items() for name in found}
        left = float(self.total)
        while left > most:
            best = None
            for name in names:
                found, kind, fewer = self.estimates[name], kind_of[name], at[name] + 1
                if fewer == len(found.counts):
                    continue
                before = self.multiply_adds(counts, layers[name])
                saved = before - self.multiply_adds({**counts, name: found.counts[fewer]}, layers[name])
                estimate = spent[kind] + found.losses[fewer] - found.losses[at[name]]
                price = self.prices[kind]
                cost = (price(estimate) - price(spent[kind])) / max(saved, 1.0)
                if best is None or cost < best[0]:
                    best = cost, name, saved, estimate
            if best is None:
                break
            _, name, saved, spent[kind_of[name]] = best
            at[name] += 1
            counts[name] = self.estimates[name].counts[at[name]]
            left -= saved
        return counts

    def count(self, student: nn.Module) -> int:
        """The multiply-adds of a student, counted as :attr:`total` is."""
        image = self.observer.images.store.get(str(WHOLE))
        return count_multiply_adds(lambda: self.observer.run(student, image, WHOLE))

    def least_share(self) -> float:
        """The share of the multiply-adds that is left with the fewest channels everywhere."""
        return self.multiply_adds({name: found.counts[-1] for name, found in self.estimates.items()}) / self.total
