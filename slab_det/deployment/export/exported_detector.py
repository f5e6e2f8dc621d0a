"""ExportedDetector: an ONNX file in the place of a model, for mmdet's data loaders and evaluators."""

from __future__ import annotations

import numpy as np
import torch
from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.model import BaseModel
from mmengine.structures import InstanceData
from torch import Tensor

from slab_det.deployment.export.runtime import load_runtime
from slab_det.runtime.errors import ExportError


@MODELS.register_module()
class ExportedDetector(BaseModel):
    """Answers ``test_step`` as a detector does, with what an exported file computes.

    Args:
        file: The ONNX file, of scope 'detector'.
        runtime: 'onnxruntime' or 'openvino'.
        threads: CPU threads; 0 lets the runtime choose.
        precision: 'f32' or, with OpenVINO, 'bf16'.

    Raises:
        ExportError: If the file has another scope, or the runtime is not there.
    """

    def __init__(self, file: str, runtime: str = 'onnxruntime', threads: int = 0, precision: str = 'f32') -> None:
        super().__init__()
        self.runtime = load_runtime(file, runtime, threads, precision)
        if self.runtime.metadata['scope'] != 'detector':
            raise ExportError(f'{file} has scope {self.runtime.metadata["scope"]}: export it with --scope detector')
        # The runner asks a model for its device.
        self.register_buffer('_device', torch.zeros(()), persistent=False)

    def forward(
        self, inputs: list[Tensor], data_samples: list[DetDataSample], mode: str = 'predict'
    ) -> list[DetDataSample]:
        if mode != 'predict':
            raise ExportError(f'an exported detector only predicts, mode={mode!r} is not possible')
        for image, sample in zip(inputs, data_samples, strict=True):
            outputs = self.runtime.run(image[None].float().numpy())
            sample.pred_instances = self._instances({k: torch.from_numpy(v) for k, v in outputs.items()}, sample)
        return data_samples

    def _instances(self, outputs: dict[str, Tensor], sample: DetDataSample) -> InstanceData:
        boxes = outputs['boxes'] / outputs['boxes'].new_tensor(sample.scale_factor).repeat(2)
        instances = InstanceData(bboxes=boxes, scores=outputs['scores'], labels=outputs['labels'])
        if 'mask_logits' in outputs:
            instances.masks = paste_masks(
                outputs['mask_logits'], boxes, sample.ori_shape[:2], self.runtime.metadata['mask_threshold']
            )
        return instances


def paste_masks(logits: Tensor, boxes: Tensor, shape: tuple[int, int], threshold: float) -> Tensor:
    """Masks at full size, (n, H, W), as mmdet pastes them; the one step that is not in the graph.

    Args:
        logits: (n, 28, 28).
        boxes: Corners in the image of ``shape``, (n, 4).
        shape: (H, W).
        threshold: Of the probability.
    """
    masks = torch.zeros(len(boxes), *shape, dtype=torch.bool)
    for i in range(len(boxes)):
        pasted, window = _do_paste_mask(logits[i : i + 1, None].sigmoid(), boxes[i : i + 1], *shape)
        masks[(i, *window)] = pasted[0] >= threshold
    return masks


def as_input(image: np.ndarray) -> np.ndarray:
    """An image (H, W, 3) as the runtimes take it: (1, 3, H, W), float32."""
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None], dtype=np.float32)
