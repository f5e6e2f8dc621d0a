"""MaskFormer: queries that classify masks of the whole image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import MaskFormerHead
from mmdet.models.detectors import MaskFormer as MaskFormerDetector
from mmdet.models.layers import PixelDecoder
from mmdet.models.seg_heads import MaskFormerFusionHead
from mmengine.structures import InstanceData
from torch import Tensor, nn

from slab_det.families.base import Family, Frame, find_part, require
from slab_det.families.operators import BoxOperators

FUSION = 'predict', 'panoptic_postprocess', 'instance_postprocess'


class MaskFormer(Family):
    """See :class:`Family`, and Cheng et al., NeurIPS 2021.

    The graph ends with masks of a quarter of the image's size; their fusion has a size that depends on the objects.
    """

    base = MaskFormerDetector
    part = 'panoptic_head'
    heads = (MaskFormerHead,)

    def __init__(self, detector: nn.Module, operators: BoxOperators) -> None:
        super().__init__(detector, operators)
        find_part(detector, 'panoptic_head', self.heads[0], ('predict', 'forward'))
        fusion = find_part(detector, 'panoptic_fusion_head', MaskFormerFusionHead, FUSION)
        require('a test_cfg without semantic_on, which mmdet lacks', not fusion.test_cfg.get('semantic_on', False))
        self.check_decoder()

    def check_decoder(self) -> None:
        """Raises :class:`Unsupported` unless the family runs the pixel decoder of the head."""
        find_part(self.detector.panoptic_head, 'pixel_decoder', PixelDecoder, ['forward'])

    @property
    def test_cfgs(self) -> tuple[dict]:
        return (self.detector.panoptic_fusion_head.test_cfg,)

    def compute(self, features: Sequence[Tensor], frame: Frame) -> tuple[Tensor, Tensor]:
        """Returns the logits of the classes (Q, classes + 1) and of the masks (Q, h, w) of all queries."""
        head, padding = self.detector.panoptic_head, frame.find_padding(features[-1])
        mask_features, memory = head.pixel_decoder(features, None)
        memory = head.decoder_input_proj(memory).flatten(2).transpose(1, 2)
        positions = head.decoder_pe(padding).flatten(2).transpose(1, 2)
        embed = head.query_embed.weight[None]
        states = head.transformer_decoder(
            query=torch.zeros_like(embed),
            key=memory,
            value=memory,
            query_pos=embed,
            key_pos=positions,
            key_padding_mask=padding.flatten(1),
        )[-1]
        return head.cls_embed(states)[0], torch.einsum('bqc,bchw->bqhw', head.mask_embed(states), mask_features)[0]

    def predict(self, computed: Sequence[Tensor], metainfo: dict, paste: Callable[..., Any]) -> dict:
        (logits, masks), cfg, fusion = computed, self.test_cfgs[0], self.detector.panoptic_fusion_head
        (height, width), size = metainfo['img_shape'][:2], metainfo['ori_shape'][:2]
        masks = F.interpolate(masks[None], metainfo['batch_input_shape'], mode='bilinear', align_corners=False)[0]
        masks = F.interpolate(masks[:, None, :height, :width], size, mode='bilinear', align_corners=False)[:, 0]
        results = {}
        if cfg.get('panoptic_on', True):
            results['pan_results'] = fusion.panoptic_postprocess(logits, masks)
        if cfg.get('instance_on', False):
            results['ins_results'] = self._find_instances(logits, masks)
        return results

    def _find_instances(self, logits: Tensor, masks: Tensor) -> InstanceData:
        """Chooses the best classes of all queries, as ``instance_postprocess``, which asks a GPU for each box."""
        fusion, limit = self.detector.panoptic_fusion_head, self.test_cfgs[0].get('max_per_image', 100)
        # Unsorted, as in mmdet.
        scores, index = logits.softmax(-1)[:, :-1].flatten().topk(limit, sorted=False)
        query, labels = torch.div(index, fusion.num_classes, rounding_mode='floor'), index % fusion.num_classes
        if fusion.num_things_classes < fusion.num_classes:
            is_thing = labels < fusion.num_things_classes
            scores, query, labels = scores[is_thing], query[is_thing], labels[is_thing]
        masks = masks[query]
        inside = masks > 0
        area = inside.float().flatten(1).sum(1)
        scores = scores * ((masks.sigmoid() * inside).flatten(1).sum(1) / (area + 1e-6))
        return InstanceData(bboxes=enclose(inside), labels=labels, scores=scores, masks=inside)


def enclose(masks: Tensor) -> Tensor:
    """Returns the corners of the boxes around masks (n, H, W), (n, 4); zeros for an empty mask."""
    lows, highs = [], []
    for seen in (masks.any(1), masks.any(2)):
        pixel = torch.arange(seen.shape[1], device=masks.device)
        highs.append(torch.where(seen, pixel + 1, 0).amax(1))
        lows.append(torch.where(seen, pixel, seen.shape[1]).amin(1).minimum(highs[-1]))
    return torch.stack([*lows, *highs], 1).float()
