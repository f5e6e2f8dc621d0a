"""Deformable DETR and DINO: queries that attend to samples of the maps near their points or boxes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmdet.models.dense_heads import DeformableDETRHead, DINOHead
from mmdet.models.detectors import DINO, DeformableDETR
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy
from torch import Tensor, nn

from slab_det.families.base import BoxFamily, Frame, Objects, check_part, find_part, nearest_base, require
from slab_det.families.deformable import has_own_sampling
from slab_det.families.operators import BoxOperators, clip

# The methods by which a detector and its head predict: a subclass may override any other method.
TRANSFORMER = 'forward_transformer', 'pre_transformer', 'forward_encoder', 'pre_decoder', 'forward_decoder'
PREDICTION = 'predict', 'predict_by_feat', '_predict_by_feat_single'


class DeformableTransformer(BoxFamily):
    """See :class:`BoxFamily`, Zhu et al., ICLR 2021, and DINO (Zhang et al., ICLR 2023).

    Objects are the best classes of all queries, without NMS and threshold.
    """

    base = DeformableDETR
    part = 'bbox_head'
    heads = DeformableDETRHead, DINOHead

    def __init__(self, detector: nn.Module, operators: BoxOperators) -> None:
        super().__init__(detector, operators)
        check_part(detector, 'detector', nearest_base(detector, (DeformableDETR, DINO)), TRANSFORMER)
        head = find_part(detector, 'bbox_head', nearest_base(detector.bbox_head, self.heads), PREDICTION)
        require('a bbox_head with sigmoid scores', head.loss_cls.use_sigmoid)
        require("mmcv's own MultiScaleDeformableAttention", has_own_sampling(detector))

    @property
    def test_cfgs(self) -> tuple[dict]:
        return (self.detector.bbox_head.test_cfg,)

    @property
    def score_thr(self) -> float:
        return 0.0

    def detect(self, features: Sequence[Tensor], frame: Frame, score_thr: float | Tensor) -> Objects:
        detector = self.detector
        sizes, paddings = [tuple(x.shape[2:]) for x in features], [frame.find_padding(x) for x in features]
        queries = torch.cat([x.flatten(2).transpose(1, 2) for x in features], 1)
        positions = [detector.positional_encoding(padding).flatten(2).transpose(1, 2) for padding in paddings]
        positions = torch.cat([x + level for x, level in zip(positions, detector.level_embed, strict=True)], 1)
        padding = torch.cat([x.flatten(1) for x in paddings], 1)
        ratios = torch.stack([detector.get_valid_ratio(x) for x in paddings], 1)
        maps = dict(spatial_shapes=tuple(sizes), level_start_index=None, valid_ratios=ratios)
        encoded = detector.forward_encoder(feat=queries, feat_mask=padding, feat_pos=positions, **maps)
        chosen, _ = detector.pre_decoder(**encoded)
        logits, boxes = detector.bbox_head(**detector.forward_decoder(**chosen, memory_mask=padding, **maps))
        return self._find_objects(logits[-1, 0], boxes[-1, 0], frame)

    def _find_objects(self, logits: Tensor, boxes: Tensor, frame: Frame) -> Objects:
        """Chooses the best scores of all queries, from logits (Q, classes) and boxes (x, y, w, h), (Q, 4)."""
        classes = self.detector.bbox_head.num_classes
        scores, index = logits.sigmoid().flatten().topk(self.test_cfgs[0].get('max_per_img', len(logits)))
        query, label = torch.div(index, classes, rounding_mode='floor'), index % classes
        corners = clip(bbox_cxcywh_to_xyxy(boxes[query]) * frame.limits, frame.limits)
        if frame.scale is not None:
            corners = corners / frame.scale
        return Objects(corners, scores, label, self.operators.first_is_number(scores))
