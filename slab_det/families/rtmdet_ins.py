"""RTMDet-Ins: RTMDet with a small convolutional network of each object, which draws its mask on a common map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmdet.models.dense_heads import RTMDetInsHead, RTMDetInsSepBNHead
from torch import Tensor, nn

from slab_det.families.base import Frame, Objects, require
from slab_det.families.dense import Dense
from slab_det.families.operators import BoxOperators, to_rows


class RTMDetIns(Dense):
    """See :class:`Dense`, and Lyu et al., arXiv 2212.07784; masks are drawn as in CondInst (Tian et al., ECCV 2020)."""

    name = 'rtmdet_ins'
    heads = RTMDetInsHead, RTMDetInsSepBNHead
    predictors = 'rtm_cls', 'rtm_reg', 'rtm_obj', 'rtm_kernel', 'projection'
    has_points = True
    has_masks = True
    prediction = '_bbox_mask_post_process', '_mask_predict_by_feat_single', 'parse_dynamic_params'

    def __init__(self, detector: nn.Module, operators: BoxOperators) -> None:
        super().__init__(detector, operators)
        strides = detector.bbox_head.prior_generator.strides
        require('a prior_generator with square strides', all(x == y for x, y in strides))

    @property
    def mask_stride(self) -> int:
        return self.detector.bbox_head.prior_generator.strides[0][0]

    def detect(self, features: Sequence[Tensor], frame: Frame, score_thr: float | Tensor) -> Objects:
        head, operators = self.detector.bbox_head, self.operators
        logits, boxes, kernels, prototypes = head(features)
        found, prior = self.find_objects(logits, boxes, (), frame, score_thr)
        points = operators.priors(head.prior_generator, [x.shape[-2:] for x in logits], kernels[0])
        strides = [stride for stride, _ in head.prior_generator.strides]
        strides = [torch.full_like(to_rows(x, 4)[:, :2], stride) for x, stride in zip(boxes, strides, strict=True)]
        kernels = torch.cat([to_rows(x, head.num_gen_params) for x in kernels])[prior]
        centers = torch.cat([points, torch.cat(strides)], 1)[prior]
        return found._replace(mask_logits=(operators.draw_masks(head, prototypes[0], kernels, centers),))
