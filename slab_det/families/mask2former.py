"""Mask2Former: a MaskFormer whose queries attend to the pixels of their masks, in maps of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

from mmdet.models.dense_heads import Mask2FormerHead
from torch import Tensor

from slab_det.families.base import Frame, find_part, require
from slab_det.families.deformable import SizedPixelDecoder
from slab_det.families.maskformer import MaskFormer


class Mask2Former(MaskFormer):
    """See :class:`MaskFormer`, and Cheng et al., CVPR 2022."""

    heads = (Mask2FormerHead,)

    def check_decoder(self) -> None:
        head = find_part(self.detector, 'panoptic_head', Mask2FormerHead, ['_forward_head'])
        require("mmdet's own MSDeformAttnPixelDecoder", type(head.pixel_decoder) is SizedPixelDecoder)

    def compute(self, features: Sequence[Tensor], frame: Frame) -> tuple[Tensor, Tensor]:
        # Padding is not masked, and so the head reads nothing of the image's frame.
        logits, masks = self.detector.panoptic_head(features, None)
        return logits[-1][0], masks[-1][0]
