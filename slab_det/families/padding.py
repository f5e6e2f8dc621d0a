"""Which pixels of the maps are padding: queries do not attend to these."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slab_det.families.base import Frame
from slab_det.families.constants import constant


def find_padding(feature: Tensor, frame: Frame) -> Tensor:
    """Whether each pixel of a map (1, C, h, w) is padding, (1, h, w)."""
    sides = zip(feature.shape[2:], frame.padded, strict=True)
    rows, columns = (nearest_pixels(*side, feature.device) for side in sides)
    return ((rows >= frame.limits[1])[:, None] | (columns >= frame.limits[0]))[None]


@constant(256)
def nearest_pixels(side: int, padded: int, device: torch.device) -> Tensor:
    """Returns the pixel of an image, along one axis, that each pixel of a map has by nearest interpolation, (side,)."""
    return F.interpolate(torch.arange(padded, dtype=torch.float32, device=device)[None, None], side)[0, 0]
