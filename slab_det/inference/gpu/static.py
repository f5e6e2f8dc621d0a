"""Computes a whole detector on tensors of fixed shapes, so that one CUDA graph can hold it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.families import Frame, find_family
from slab_det.families.operators import BoxOperators


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
        """Computes from an image (1, 3, H, W) what :meth:`slab_det.families.Family.predict` makes predictions from.

        Args:
            image: Normalised and padded.
            frame: Result of :func:`measure_frame`, (3, 4).
        """
        features = self.family.detector.extract_feat(image)
        return self.family.compute(features, Frame(*frame, padded=tuple(image.shape[2:])))


def measure_frame(metainfo: dict) -> Tensor:
    """Returns the rows of a :class:`Frame`, (3, 4): unpadded size of an image, its scale, and the inverse scale."""
    (height, width), (x, y) = metainfo['img_shape'][:2], metainfo['scale_factor'][:2]
    return torch.tensor([[width, height] * 2, [x, y] * 2, [1 / x, 1 / y] * 2], dtype=torch.float32)
