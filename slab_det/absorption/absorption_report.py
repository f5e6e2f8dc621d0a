"""The report of an absorption: the outcome and the error of each LayerNorm and each unit of hidden channels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from slab_det.common.record import Record
from slab_det.compare.ruler import RetainedAP, describe_loss

# The reason given for norms that could be absorbed.
KEPT_BY_CHOICE = 'kept by choice'


@dataclass(frozen=True)
class NormAbsorption:
    """Outcome and error of one LayerNorm; :class:`slab_det.fusion.NormFusion` names the layers it was folded into.

    Attributes:
        norm: Dotted name of the norm.
        outcome: 'absorbed' or 'kept'.
        reason: Why the norm was kept, or ''.
        error: Error of the folded map as a share of the variance of the norm's output, on held-out batches; None where
            nothing was fitted.
    """

    norm: str
    outcome: Literal['absorbed', 'kept']
    reason: str = ''
    error: float | None = None


@dataclass(frozen=True)
class ChannelAbsorption:
    """Outcome and error of one unit of hidden channels, see :class:`slab_det.fusion.Channels`.

    Attributes:
        unit: Dotted name of the unit.
        channels: Number of hidden channels before; None where the unit was left alone.
        kept: Number of hidden channels after.
        reason: Why the unit was left alone, or ''.
        error: Mean squared error of the readers on the images that they are fitted on, as a share of the variance of
            the teacher's residual stream behind them, or of the teacher's outputs in a head. Of a neck, before its
            readers are fitted.
    """

    unit: str
    channels: int | None = None
    kept: int | None = None
    reason: str = ''
    error: float | None = None


@dataclass
class AbsorptionReport(Record):
    """Report of :func:`slab_det.absorb`.

    Attributes:
        norms: The LayerNorms: those that were absorbed in the order of their calls, then those that stay.
        refits: For each layer that was fitted because norms were absorbed, by name, the mean squared distance of the
            student's stream from the teacher's, over the same distance before the fit, on held-out batches; 1 where the
            layer stayed as it was. The layers are those that write the residual stream, and the neck's convolutions.
        channels: The units of hidden channels, where channels were to be removed: those that lost some come first.
        multiply_adds: Multiply-adds of teacher and student for the first image, without heads in which no channels can
            be removed; None unless channels were removed for a share of them.
        retained_ap: Share of the teacher's AP that the student retains, estimated on held-out images without labels
            (:func:`slab_det.compare.ruler.retained_ap`); None where the teacher finds nothing (again), or detections
            cannot be compared.
        retained_ap_error: Standard error of this share; None where a single image was compared.
        held_out: Whether these images were held out; with fewer than five batches they are those that were fitted.
        num_images: Number of images compared; 0 where detections cannot be compared.
        num_detections: Number of the teacher's detections in these images.
    """

    norms: list[NormAbsorption] = field(default_factory=list)
    refits: dict[str, float] = field(default_factory=dict)
    channels: list[ChannelAbsorption] = field(default_factory=list)
    multiply_adds: tuple[int, int] | None = None
    retained_ap: float | None = None
    retained_ap_error: float | None = None
    held_out: bool = True
    num_images: int = 0
    num_detections: int = 0

    @property
    def kept(self) -> list[NormAbsorption]:
        """The norms that stayed LayerNorm."""
        return [norm for norm in self.norms if norm.outcome == 'kept']

    @property
    def pruned(self) -> list[ChannelAbsorption]:
        """The units that lost channels."""
        return [unit for unit in self.channels if not unit.reason]

    @property
    def counts(self) -> dict[str, int]:
        """Number of channels left in each unit that lost some, by its name."""
        return {unit.unit: unit.kept for unit in self.pruned}

    def describe_loss(self) -> str:
        """Says what the share tells about the loss of AP."""
        if not self.held_out:
            return 'the loss of AP is unknown, because nothing was held out: give at least 5 batches of images'
        error = math.inf if self.retained_ap_error is None else self.retained_ap_error
        return describe_loss(RetainedAP(self.retained_ap, error), self.num_detections)

    def why_unknown(self) -> str:
        """Says why the share is unknown where detections can be compared."""
        again = ' that it finds again when they are mirrored' if self.num_detections else ''
        return f'the teacher finds nothing in {self._images}{again}'

    @property
    def _images(self) -> str:
        return f'{self.num_images} {"held-out" if self.held_out else "fitted"} images'

    @classmethod
    def from_dict(cls, values: dict) -> AbsorptionReport:
        """The inverse of ``to_dict``."""
        kinds = dict(norms=NormAbsorption, channels=ChannelAbsorption)
        return cls(**values | {name: [kind(**part) for part in values[name]] for name, kind in kinds.items()})

    def lines(self) -> list[str]:
        absorbed = [norm for norm in self.norms if norm.outcome == 'absorbed']
        lines = [f'{len(absorbed)} LayerNorms absorbed, {len(self.kept)} kept']
        if self.retained_ap is not None:
            lines[0] += (
                f'; AP retained, by {self.num_detections} detections in {self._images}: {self.retained_ap:.1%}; '
                f'{self.describe_loss()}'
            )
        elif self.num_images:
            lines[0] += f'; the AP retained is unknown: {self.why_unknown()}'
        chosen = [norm for norm in self.kept if norm.reason == KEPT_BY_CHOICE]
        lines += [f'  {len(chosen)} {KEPT_BY_CHOICE}'] if chosen else []
        lines += [f'  {norm.norm}: kept, {norm.reason}' for norm in self.kept if norm not in chosen]
        if absorbed:
            worst = max(absorbed, key=lambda norm: norm.error)
            lines.append(
                f'  error, as a share of variance: {sum(norm.error for norm in absorbed) / len(absorbed):.1%} on '
                f'average, largest at {worst.norm}: {worst.error:.1%}'
            )
        if self.pruned:
            worst = max(self.pruned, key=lambda unit: unit.error)
            lines.append(
                f'channels removed in {len(self.pruned)} units, {sum(unit.kept for unit in self.pruned)} of '
                f'{sum(unit.channels for unit in self.pruned)} left; error, as a share of variance: '
                f'largest at {worst.unit}: {worst.error:.1%}'
            )
        if self.multiply_adds:
            before, after = self.multiply_adds
            scale, unit = (1e9, 'billion') if before >= 1e10 else (1e6, 'million')
            counts = f'{after / scale:.1f} of {before / scale:.1f} {unit}'
            lines.append(f'multiply-adds: {counts} left, {after / before:.0%}')
        lines += [f'  {unit.unit}: left alone, {unit.reason}' for unit in self.channels if unit.reason]
        return lines
