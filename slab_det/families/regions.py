"""Where the heads of a detector run for absorption: positions and regions that the teacher finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# Proposals of an image that the fits of a box head read, and detections that the fits of a mask head read.
PROPOSALS, DETECTIONS = 256, 8
# The detections that the fits read are chosen, evenly by rank, from the BEST ones of an image.
BEST = 32


class Regions(NamedTuple):
    """What a teacher finds in a batch, and where fits of the heads look.

    Attributes:
        weights: Weights of the positions of the dense head, the RPN or the head of a single stage, (B, 1, H, W) for
            each level. One half of their sum is equal for all positions, the other half goes by the highest score of a
            class: most positions show no object, and their outputs hardly matter.
        proposals: Regions for the box head of each stage, (n, 5): the index of the image, x1, y1, x2, y2. The later
            stages of a cascade read the regions that the teacher's earlier stages refined.
        detections: Regions for the mask heads, (n, 5); None without regions for a box head.
    """

    weights: list[Tensor]
    proposals: Sequence[Tensor] = ()
    detections: Tensor | None = None

    def position_weights(self, layer: str, level: int) -> Tensor | None:
        """The weights for a layer with this name; None in a head that reads regions, which weigh the same."""
        return None if layer.startswith('roi_head.') else self.weights[level]


def weigh_positions(logits: Sequence[Tensor]) -> list[Tensor]:
    """The weights of :class:`Regions` for the logits (B, C, H, W) of a dense head, of each level."""
    scores = [x.sigmoid().amax(1, keepdim=True) for x in logits]
    mean = sum(x.sum() for x in scores) / sum(x.numel() for x in scores)
    return [(x / mean + 1) / 2 for x in scores]
