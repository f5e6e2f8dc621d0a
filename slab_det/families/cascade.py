"""Cascade (Mask) R-CNN: an RPN, and a RoI head of several stages, each of which refines the boxes of the one before."""

from __future__ import annotations

from collections.abc import Sequence

from mmdet.models.roi_heads import CascadeRoIHead
from torch import Tensor, nn

from slab_det.families.base import find_part, require
from slab_det.families.two_stage import TwoStage


class Cascade(TwoStage):
    """See :class:`TwoStage`, and Cai and Vasconcelos, CVPR 2018.

    Scores come from the mean of the logits of all stages, and masks from the mean of the probabilities of all stages.
    """

    name = 'cascade'
    heads = absorbed = (CascadeRoIHead,)

    def check(self) -> None:
        super().check()
        find_part(self.detector, 'roi_head', CascadeRoIHead, ['_refine_roi'])
        heads = self.stages('bbox_head')
        custom = any(head.custom_activation for head in heads)
        same = len({head.num_classes for head in heads}) == 1
        require('bbox_heads with softmax, of equal num_classes', same and not custom)

    @classmethod
    def stage_arguments(cls, count: int) -> list[tuple]:
        return [(stage,) for stage in range(count)]

    def regress(
        self, features: Sequence[Tensor], boxes: Tensor, scores: Tensor, limits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        extractors, heads, total = self.stages('bbox_roi_extractor'), self.stages('bbox_head'), None
        for extractor, head, box_head in zip(extractors, heads, self.box_heads, strict=True):
            regions, order = self.operators.pool(extractor, features, boxes, scores)
            logits, deltas = box_head(regions)
            if order is not None:
                boxes, scores, total = boxes[order], scores[order], None if total is None else total[order]
            total = logits if total is None else total + logits
            if head is not heads[-1]:
                boxes = self._refine(head, boxes, logits, deltas, limits)
        return boxes, scores, total / len(heads), deltas

    def _refine(self, head: nn.Module, boxes: Tensor, logits: Tensor, deltas: Tensor, limits: Tensor) -> Tensor:
        """Decodes the deltas of the best class of each box (n, 4)."""
        deltas = deltas.reshape(-1, 1 if head.reg_class_agnostic else head.num_classes, 4)
        if not head.reg_class_agnostic:
            label = logits[:, :-1].argmax(1)
            deltas = deltas.gather(1, label[:, None, None].expand(-1, 1, 4))
        return self.operators.decode(head.bbox_coder, boxes, deltas, limits)[:, 0]

    def find_masks(
        self, features: Sequence[Tensor], corners: Tensor, scores: Tensor, labels: Tensor
    ) -> tuple[Tensor, ...]:
        pooled, found = {}, []
        for extractor, mask_head in zip(self.stages('mask_roi_extractor'), self.mask_heads, strict=True):
            # Extractors have no weights, and mostly the same settings.
            settings = extractor.finest_scale, extractor.num_inputs, repr(extractor.roi_layers)
            if settings not in pooled:
                pooled[settings] = self.operators.pool(extractor, features, corners, scores)
            regions, order = pooled[settings]
            found.append(mask_head(regions, labels, order))
        return tuple(found)
