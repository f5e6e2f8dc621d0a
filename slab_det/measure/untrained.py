"""Random weights that can be timed: statistics that fit them, and heads with the same work in every detector."""

import torch
from mmdet.models.dense_heads import RPNHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from torch import nn

from slab_det.norms import named_offline_norms, set_gamma
from slab_det.recalibration.fixed_point import recalibrate

# A choice, not a measurement: COCO has seven objects an image, and score thresholds of 0.05 let many more through.
OBJECTS = 32


def prepare_untrained(model: nn.Module) -> bool:
    """Makes a detector with random weights cost what a trained one does, in place.

    Norms are at gamma = 0, as after training, with statistics of noise: at their initial ones activations grow from
    block to block. How much work heads have depends on what they find, and that on chance. So they are made blind:
    every proposal is an anchor, and the best ``OBJECTS`` of them become objects, whatever the features are.

    Args:
        model: A detector in eval mode, unfused.

    Returns:
        Whether the heads were of a kind that can be made blind: RPN and one box head.
    """
    set_gamma(model, 0.0)
    if any(True for _ in named_offline_norms(model)):
        noise = torch.randn(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
        recalibrate(model, [noise.to(next(model.parameters()).device)], max_passes=1, progress=False)
    rpn_head, roi_head = getattr(model, 'rpn_head', None), getattr(model, 'roi_head', None)
    box_head = getattr(roi_head, 'bbox_head', None)
    if not (isinstance(rpn_head, RPNHead) and isinstance(box_head, BBoxHead)):
        return False
    for layer in (rpn_head.rpn_cls, rpn_head.rpn_reg, box_head.fc_cls, box_head.fc_reg):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    # Sure of the first class: above every score threshold.
    nn.init.constant_(box_head.fc_cls.bias[:1], 10.0)
    limit = roi_head.test_cfg.max_per_img
    # mmdet takes -1 as no limit.
    roi_head.test_cfg.max_per_img = min(OBJECTS, limit) if limit > 0 else OBJECTS
    return True
