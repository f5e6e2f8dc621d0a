"""The modules that export_onnx traces: a backbone, or a whole detector from raw pixels to detections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mmdet.models.data_preprocessors import DetDataPreprocessor
from torch import Tensor, nn

from slab_det.export.dynamic_operators import DynamicOperators
from slab_det.export.settings import describe_test_cfg
from slab_det.families import EXPORTED, Frame, find_family
from slab_det.families.base import find_part
from slab_det.norms.base import at_least_float32


class BackboneGraph(nn.Module):
    """Preprocessing and backbone of a detector, after :func:`make_size_free`.

    Shape:
        (1, 3, H, W), 0 to 255 -> the feature maps that the backbone returns.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        find_part(detector, 'data_preprocessor', DetDataPreprocessor)
        self.detector = detector

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(at_least_float32, self.detector.backbone(self._preprocess(image))))

    def _preprocess(self, image: Tensor) -> Tensor:
        """Normalises and pads as ``data_preprocessor`` does at test time."""
        preprocessor = self.detector.data_preprocessor
        if preprocessor._channel_conversion:
            image = image.flip(1)
        if preprocessor._enable_normalize:
            image = (image - preprocessor.mean) / preprocessor.std
        height, width, divisor = image.shape[2], image.shape[3], preprocessor.pad_size_divisor
        bottom, right = ((side + divisor - 1) // divisor * divisor - side for side in (height, width))
        return F.pad(image, (0, right, 0, bottom), value=float(preprocessor.pad_value))

    def metadata(self) -> dict:
        """What the file stores of the settings of the detector."""
        return {}

    def output_names(self) -> list[str]:
        return [f'feature{i}' for i in range(len(self.detector.backbone.out_indices))]

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Names of the outputs' dimensions that depend on the image."""
        return {name: {0: 'batch', 2: f'height{name[-1]}', 3: f'width{name[-1]}'} for name in self.output_names()}


class DetectorGraph(BackboneGraph):
    """The whole detector, with masks as logits; boxes are in pixels of the input image, sorted by score.

    Attributes:
        score_thr: Detections with this score or a smaller one are dropped.

    Shape:
        (1, 3, H, W) -> boxes (n, 4), scores (n,), labels (n,) and, with masks, mask logits (n, 28, 28) or, with a
        ``mask_stride`` of the family, (n, h, w).
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__(detector)
        self.family = find_family(detector, EXPORTED)(detector, DynamicOperators())
        self.register_buffer('score_thr', torch.tensor(self.family.score_thr, dtype=torch.float32))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        # The tracer would store the numbers in image.shape as constants.
        limits = torch._shape_as_tensor(image)[[3, 2, 3, 2]].to(image.dtype)
        features = self.detector.extract_feat(self._preprocess(image))
        found = self.family.detect(features, Frame(limits), self.score_thr)
        masks = (found.mean_mask_logits(),) if self.family.has_masks else ()
        return found.corners, found.scores, found.labels, *masks

    def metadata(self) -> dict:
        family = self.family
        metadata = dict(family=family.name, test_cfg=describe_test_cfg(family.stored, family.test_cfgs))
        if family.has_masks:
            metadata |= dict(mask_threshold=family.mask_threshold, mask_stride=family.mask_stride)
        return metadata

    def output_names(self) -> list[str]:
        return ['boxes', 'scores', 'labels'] + ['mask_logits'] * self.family.has_masks

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        axes = {name: {0: 'detections'} for name in self.output_names()}
        if self.family.mask_stride is not None:
            axes['mask_logits'] |= {1: 'mask_height', 2: 'mask_width'}
        return axes
