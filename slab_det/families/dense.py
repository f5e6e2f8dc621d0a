"""What the families of dense heads with sigmoid scores have in common; each of them is one file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from mmdet.models.detectors import SingleStageDetector
from mmdet.models.task_modules.coders import DistancePointBBoxCoder
from mmdet.models.task_modules.prior_generators import AnchorGenerator, MlvlPointGenerator
from mmdet.structures import DetDataSample
from torch import Tensor, nn

from slab_det.families.base import (
    DENSE_PREDICTION,
    BoxFamily,
    Frame,
    Objects,
    check_deltas,
    check_nms,
    find_part,
    nearest_base,
    require,
)
from slab_det.families.operators import EMPTY, BoxOperators, to_rows
from slab_det.families.regions import Regions, weigh_positions


class Dense(BoxFamily):
    """See :class:`BoxFamily`. Objects are the best classes of the anchors or points of each level.

    A third output of the head is a factor of the scores: its sigmoid, of each anchor or point.

    Attributes:
        has_points: Whether the head predicts distances from points, and not deltas of anchors.
        prediction: Further methods by which the head predicts.
    """

    base = SingleStageDetector
    part = 'bbox_head'
    stored = {'': dict(nms_pre=-1, min_bbox_size=-1, score_thr=0, max_per_img=None, nms=None)}
    has_points: ClassVar[bool] = False
    prediction: ClassVar[tuple[str, ...]] = ()

    def __init__(self, detector: nn.Module, operators: BoxOperators) -> None:
        super().__init__(detector, operators)
        # A head with other outputs would predict with them.
        base = nearest_base(detector.bbox_head, self.heads)
        head = find_part(
            detector, 'bbox_head', base, (*DENSE_PREDICTION, *self.prediction, 'forward', 'forward_single')
        )
        cfg = head.test_cfg
        custom = getattr(head.loss_cls, 'custom_cls_channels', False)
        require('a bbox_head with sigmoid scores', head.use_sigmoid_cls and not custom)
        generator = find_part(head, 'prior_generator', MlvlPointGenerator if self.has_points else AnchorGenerator)
        if self.has_points:
            find_part(head, 'bbox_coder', DistancePointBBoxCoder, ('decode',))
        else:
            check_deltas(head)
        boxed = head.bbox_coder.use_box_type or getattr(generator, 'use_box_type', False)
        require('boxes as tensors, without use_box_type', not boxed)
        check_nms('bbox_head', cfg)
        limits = cfg.get('nms_pre', -1), cfg.get('max_per_img', -1)
        require('a positive nms_pre and max_per_img in test_cfg', min(limits) > 0)
        # mmdet drops small boxes in the original image, whose scale a file does not know.
        require('a min_bbox_size of at most 0 in test_cfg', cfg.get('min_bbox_size', -1) <= 0)

    @classmethod
    @torch.no_grad()
    def find_regions(
        cls, detector: nn.Module, images: Tensor, samples: Sequence[DetDataSample], share: float
    ) -> Regions:
        return Regions(weigh_positions(detector.bbox_head(detector.extract_feat(images))[0]))

    @classmethod
    def run_heads(cls, detector: nn.Module, maps: Sequence[Tensor], regions: Regions) -> None:
        detector.bbox_head(maps)

    @property
    def test_cfgs(self) -> tuple[dict]:
        return (self.detector.bbox_head.test_cfg,)

    @property
    def score_thr(self) -> float:
        return self.test_cfgs[0].get('score_thr', 0)

    def detect(self, features: Sequence[Tensor], frame: Frame, score_thr: float | Tensor) -> Objects:
        logits, boxes, *factors = self.detector.bbox_head(features)
        return self.find_objects(logits, boxes, factors, frame, score_thr)[0]

    def find_objects(
        self,
        logits: Sequence[Tensor],
        boxes: Sequence[Tensor],
        factors: Iterable[Sequence[Tensor]],
        frame: Frame,
        score_thr: float | Tensor,
    ) -> tuple[Objects, Tensor]:
        """Finds the objects in the outputs of the head, of each level, and the anchor or point of each object, (n,)."""
        head, operators, classes = self.detector.bbox_head, self.operators, self.detector.bbox_head.num_classes
        sizes = [x.shape[-2:] for x in logits]
        # A CPU rounds the sigmoid of a value by its position in memory, which is that in mmdet.
        levels = [to_rows(x, classes).sigmoid().flatten() for x in logits]
        boxes = torch.cat([to_rows(x, 4) for x in boxes])
        scores, index = operators.topk_above(levels, head.test_cfg.nms_pre, score_thr)
        prior, label = torch.div(index, classes, rounding_mode='floor'), index % classes
        priors = operators.priors(head.prior_generator, sizes, boxes)
        decode = operators.decode_distances if self.has_points else operators.decode
        corners = decode(head.bbox_coder, priors, boxes, frame.limits, prior)
        if frame.rescale is not None:
            corners = corners * frame.rescale
        for factor in factors:
            factor = torch.cat([to_rows(x, 1)[:, 0].sigmoid() for x in factor])[prior]
            scores = torch.where(scores > EMPTY, scores * factor, EMPTY)
        if head.test_cfg.get('min_bbox_size', -1) >= 0:
            x1, y1, x2, y2 = corners.unbind(-1)
            scores = torch.where((x2 > x1) & (y2 > y1), scores, EMPTY)
        corners, scores, labels, exact, chosen = self.choose(scores, corners, lambda index: label[index])
        if exact is not None:
            # A factor may be NaN.
            exact = exact & operators.first_is_number(scores)
        return Objects(corners, scores, labels, exact), prior[chosen]
