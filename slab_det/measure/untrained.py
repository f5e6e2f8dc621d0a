"""Prepares detectors with random weights for timing, so that they take as long as trained ones."""

import torch
from mmdet.models.dense_heads import RPNHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from torch import nn

from slab_det.common.modules import input_channels
from slab_det.norms import named_offline_norms, set_gamma
from slab_det.recalibration.fixed_point import recalibrate

# An estimate: a COCO image has seven objects on average, and more detections pass the score threshold of 0.05.
OBJECTS = 32


def prepare_untrained(model: nn.Module) -> bool:
    """Changes a detector with random weights, in place, so that it takes as long as a trained one.

    Norms get gamma = 0, as after training, and statistics estimated on noise; with the initial statistics activations
    grow from block to block. The time of heads depends on the number of objects, which is arbitrary with random
    weights. So heads ignore the features: every proposal is an anchor, and the top ``OBJECTS`` become objects.

    Args:
        model: A detector in eval mode, unfused.

    Returns:
        Whether the heads were changed, which needs an RPN and a single box head.
    """
    set_gamma(model, 0.0)
    if any(True for _ in named_offline_norms(model)):
        noise = torch.randn(1, input_channels(model), 128, 128, generator=torch.Generator().manual_seed(0))
        recalibrate(model, [noise.to(next(model.parameters()).device)], max_passes=1, progress=False)
    rpn_head, roi_head = getattr(model, 'rpn_head', None), getattr(model, 'roi_head', None)
    box_head = getattr(roi_head, 'bbox_head', None)
    if not (isinstance(rpn_head, RPNHead) and isinstance(box_head, BBoxHead)):
        return False
    for layer in (rpn_head.rpn_cls, rpn_head.rpn_reg, box_head.fc_cls, box_head.fc_reg):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    # The first class gets a score above every threshold.
    nn.init.constant_(box_head.fc_cls.bias[:1], 10.0)
    limit = roi_head.test_cfg.max_per_img
    # max_per_img=-1 means no limit.
    roi_head.test_cfg.max_per_img = min(OBJECTS, limit) if limit > 0 else OBJECTS
    return True
