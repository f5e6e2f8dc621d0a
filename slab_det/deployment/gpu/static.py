"""Computes a whole detector on tensors of fixed shapes, so that one CUDA graph can hold it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.deployment.box_operators import EMPTY, BoxOperators
from slab_det.deployment.heads import Frame, find_family


class StaticDetector:
    """Runs a detector on tensors whose shapes do not depend on the number of objects.

    Args:
        detector: The detector, whose modules run.
        operators: Box operators that return tensors of fixed shapes.
        fused: Whether the heads run in their fused forms, with fewer kernels.

    Raises:
        Unsupported: If no family of heads computes what the detector does.
    """

    def __init__(self, detector: nn.Module, operators: BoxOperators, fused: bool = False) -> None:
        self.family = find_family(detector)(detector, operators, fused)
        self.family.check_fixed()

    def __call__(self, image: Tensor, frame: Tensor) -> tuple[Tensor, ...]:
        """Detects the objects of an image (1, 3, H, W); the first ``count`` of the n returned rows are objects.

        Args:
            image: Normalised and padded.
            frame: Result of :func:`measure_frame`, (3, 4).

        Returns:
            Integers (count, exact); exact is 0 if ``predict`` of the detector may find other objects. Then, best first:
            corners in the original image (n, 4), scores (n,), labels (n,) and, with masks, their probabilities
            (n, 28, 28), or with a ``mask_stride`` of the family their logits (n, h, w).
        """
        frame, family = Frame(*frame), self.family
        found = family.detect(family.detector.extract_feat(image), frame, family.score_thr)
        masks = found.mask_logits
        if masks and family.mask_stride is None:
            masks = (found.mask_probabilities(),)
        summary = torch.stack([(found.scores > EMPTY).sum(), found.exact.long()])
        return summary, found.corners, found.scores, found.labels, *masks


def measure_frame(metainfo: dict) -> Tensor:
    """Returns the rows of a :class:`Frame`, (3, 4): unpadded size of an image, its scale, and the inverse scale."""
    (height, width), (x, y) = metainfo['img_shape'][:2], metainfo['scale_factor'][:2]
    return torch.tensor([[width, height] * 2, [x, y] * 2, [1 / x, 1 / y] * 2], dtype=torch.float32)
