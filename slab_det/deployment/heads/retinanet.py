"""RetinaNet: a dense head with sigmoid scores of each class of each anchor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmdet.models.dense_heads import RetinaHead
from mmdet.models.detectors import SingleStageDetector
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from torch import Tensor, nn

from slab_det.deployment.box_operators import EMPTY, BoxOperators, flat
from slab_det.deployment.heads.base import (
    DENSE_PREDICTION,
    Family,
    Frame,
    Objects,
    check_boxes,
    find_part,
    require,
)


class RetinaNet(Family):
    """See :class:`Family`. Objects are the best classes of the anchors of each level (Lin et al., ICCV 2017)."""

    name = 'retinanet'
    base = SingleStageDetector
    stored = {'': dict(nms_pre=-1, min_bbox_size=-1, score_thr=0, max_per_img=None, nms=None)}
    predictors = 'retina_cls', 'retina_reg'

    def __init__(self, detector: nn.Module, operators: BoxOperators, fused: bool = False) -> None:
        super().__init__(detector, operators)
        # A head with other outputs would predict with them: a third one is a factor of the scores.
        head = find_part(detector, 'bbox_head', RetinaHead, (*DENSE_PREDICTION, 'forward', 'forward_single'))
        cfg = head.test_cfg
        find_part(head, 'prior_generator', AnchorGenerator)
        custom = getattr(head.loss_cls, 'custom_cls_channels', False)
        require('a bbox_head with sigmoid scores', head.use_sigmoid_cls and not custom)
        check_boxes('bbox_head', head, cfg)
        limits = cfg.get('nms_pre', -1), cfg.get('max_per_img', -1)
        require('a positive nms_pre and max_per_img in test_cfg', min(limits) > 0)
        # mmdet drops small boxes in the original image, whose scale a file does not know.
        require('a min_bbox_size of at most 0 in test_cfg', cfg.get('min_bbox_size', -1) <= 0)

    @property
    def test_cfgs(self) -> tuple[dict]:
        return (self.detector.bbox_head.test_cfg,)

    @property
    def score_thr(self) -> float:
        return self.test_cfgs[0].get('score_thr', 0)

    def detect(self, features: Sequence[Tensor], frame: Frame, score_thr: float | Tensor) -> Objects:
        head, operators, classes = self.detector.bbox_head, self.operators, self.detector.bbox_head.num_classes
        logits, deltas = head(features)
        sizes = [x.shape[-2:] for x in logits]
        levels, deltas = [flat(x, classes).flatten() for x in logits], torch.cat([flat(x, 4) for x in deltas])
        scores, place = operators.best_above(levels, head.test_cfg.nms_pre, score_thr)
        anchor, label = torch.div(place, classes, rounding_mode='floor'), place % classes
        priors = operators.priors(head.prior_generator, sizes, deltas)
        corners = operators.decode(head.bbox_coder, priors, deltas, frame.limits, anchor)
        if frame.rescale is not None:
            corners = corners * frame.rescale
        if head.test_cfg.get('min_bbox_size', -1) >= 0:
            x1, y1, x2, y2 = corners.unbind(-1)
            scores = torch.where((x2 > x1) & (y2 > y1), scores, EMPTY)
        return Objects(*self.choose(scores, corners, lambda place: label[place]))
