"""What became of the LayerNorms and FFNs of a detector that absorbed them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from slab_det.measure.agreement import expected_loss

# The reason of norms that ``keep='all'`` leaves.
KEPT_BY_CHOICE = 'kept by choice'


@dataclass(frozen=True)
class NormAbsorption:
    """What became of one LayerNorm; :class:`slab_det.fusion.NormFusion` says which layers took it.

    Attributes:
        norm: Its dotted name.
        outcome: 'absorbed' or 'kept'.
        reason: Why it was kept, or ''.
        own: Share of the norm's variance that the best affine map of the teacher's input leaves: how far this norm is
            from affine. Shares are of held-out batches, over tokens and channels; None where nothing was measured.
        left: Share that the folded map leaves of the student's input; what is more than ``own`` comes from the norms
            before.
    """

    norm: str
    outcome: Literal['absorbed', 'kept']
    reason: str = ''
    own: float | None = None
    left: float | None = None


@dataclass(frozen=True)
class FFNAbsorption:
    """What became of one FFN.

    Attributes:
        ffn: Its dotted name.
        channels: Hidden channels that it had; None where it was left alone.
        hidden: Hidden channels that are left.
        reason: Why it was left alone, or ''.
        left: Share of the variance of what the FFN has to add to the stream that the pruned FFN misses, on held-out
            batches.
    """

    ffn: str
    channels: int | None = None
    hidden: int | None = None
    reason: str = ''
    left: float | None = None


@dataclass
class AbsorptionReport:
    """What :func:`slab_det.absorb` did.

    Attributes:
        norms: The LayerNorms, in the order of their calls; those that are never called last.
        refits: The layers that write the residual stream, in the order of their calls, and the neck's convolutions, by
            name: mean squared distance of the stream behind the layer from the teacher's, over the same distance before
            the layer was fitted, on held-out batches. 1 where the layer stayed as it was.
        ffns: The FFNs, in the order of their calls, where channels were to be pruned.
        agreement: With the teacher on held-out images; None where it finds nothing in them, or no detections can be
            compared.
        num_images: On how many; 0 where no detections can be compared.
        num_detections: How many the teacher has in them.
    """

    norms: list[NormAbsorption] = field(default_factory=list)
    refits: dict[str, float] = field(default_factory=dict)
    ffns: list[FFNAbsorption] = field(default_factory=list)
    agreement: float | None = None
    num_images: int = 0
    num_detections: int = 0

    @property
    def kept(self) -> list[NormAbsorption]:
        """The norms that stayed."""
        return [norm for norm in self.norms if norm.outcome == 'kept']

    @property
    def pruned(self) -> list[FFNAbsorption]:
        """The FFNs that lost channels."""
        return [ffn for ffn in self.ffns if not ffn.reason]

    def rank(self) -> list[str]:
        """The norms that were fitted, the least affine first."""
        return [norm.norm for norm in sorted(self.norms, key=lambda norm: -(norm.own or 0)) if norm.own is not None]

    def to_dict(self) -> dict:
        """The attributes, as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> AbsorptionReport:
        """The inverse of :meth:`to_dict`."""
        kinds = dict(norms=NormAbsorption, ffns=FFNAbsorption)
        return cls(**values | {name: [kind(**part) for part in values[name]] for name, kind in kinds.items()})

    def __str__(self) -> str:
        absorbed = [norm for norm in self.norms if norm.outcome == 'absorbed']
        lines = [f'{len(absorbed)} LayerNorms absorbed, {len(self.kept)} kept']
        if self.agreement is not None:
            lines[0] += (
                f'; agreement with the teacher on {self.num_detections} detections in {self.num_images} held-out '
                f'images: {self.agreement:.3f}, AP about {100 * expected_loss(self.agreement):.1f} lower'
            )
        elif self.num_images:
            lines[0] += f'; agreement is undefined: the teacher finds nothing in {self.num_images} held-out images'
        chosen = [norm for norm in self.kept if norm.reason == KEPT_BY_CHOICE]
        lines += [f'  {len(chosen)} {KEPT_BY_CHOICE}'] if chosen else []
        lines += [f'  {norm.norm}: kept, {norm.reason}' for norm in self.kept if norm not in chosen]
        if absorbed:
            worst = max(absorbed, key=lambda norm: norm.left)
            lines.append(
                f'  left of their variance: {sum(norm.left for norm in absorbed) / len(absorbed):.1%} on average, most '
                f'at {worst.norm}: {worst.left:.1%}, of which {worst.own:.1%} is its own'
            )
        if self.pruned:
            worst = max(self.pruned, key=lambda ffn: ffn.left)
            lines.append(
                f'{len(self.pruned)} FFNs pruned, {sum(ffn.hidden for ffn in self.pruned)} of '
                f'{sum(ffn.channels for ffn in self.pruned)} hidden channels left; most is missing at {worst.ffn}: '
                f'{worst.left:.1%} of what it has to add'
            )
        lines += [f'  {ffn.ffn}: left alone, {ffn.reason}' for ffn in self.ffns if ffn.reason]
        return '\n'.join(lines)
