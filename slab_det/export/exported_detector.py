"""ExportedDetector: an exported file as a model of mmdet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.model import BaseModel
from mmengine.structures import InstanceData
from torch import Tensor

from slab_det.common.errors import ExportError
from slab_det.export.loaded_file import load_runtime
from slab_det.export.settings import find_resize, follow_config
from slab_det.families.masks import check_mask_format, enlarge_masks, paste_masks


@MODELS.register_module()
class ExportedDetector(BaseModel):
    """An mmdet model that predicts by running an exported file.

    Args:
        file: The ONNX file, of scope 'detector'.
        pipeline: Configs of the test pipeline, whose resize must equal the file's; None skips this check.
        detector: Config of the detector. The file follows its ``score_thr``, a smaller ``max_per_img`` and its
            ``mask_thr_binary``; its other settings must equal the file's. None: the settings of the file.
        masks: 'full' or 'rle', see :func:`slab_det.load_detector`.
        **options: Options of :func:`load_runtime`.

    Raises:
        ExportError: If the file has another scope or no masks to encode, was exported for another resize or with
            settings that it cannot change, or the runtime is not installed.
    """

    def __init__(
        self,
        file: str,
        pipeline: Sequence[dict] | None = None,
        masks: str = 'full',
        detector: dict | None = None,
        **options,
    ) -> None:
        check_mask_format(masks, ExportError)
        super().__init__()
        self.runtime, self.masks = load_runtime(file, **options), masks
        if self.runtime.metadata['scope'] != 'detector':
            raise ExportError(f'{file} has scope {self.runtime.metadata["scope"]}: export it with --scope detector')
        expected, resize = self.runtime.metadata['image']['resize'], find_resize(pipeline or ())
        if pipeline is not None and expected is not None and resize != expected:
            raise ExportError(
                f'{file} was exported for the resize {expected}, and this config has {resize or "no resize"}: the file '
                'would find other objects; use the config of the export, or export again with this config'
            )
        self.mask_stride = self.runtime.metadata.get('mask_stride')
        found = 'no masks' if 'mask_threshold' not in self.runtime.metadata else None
        found = 'masks of the whole image' if self.mask_stride is not None else found
        if masks == 'rle' and found is not None:
            raise ExportError(f"masks='rle' encodes masks of boxes, and {file} outputs {found}; leave masks= out")
        self.settings = follow_config(file, self.runtime.metadata, detector)
        if self.settings.score_thr is not None:
            self.runtime = self.runtime.with_threshold(self.settings.score_thr)
        # The runner reads the device of a model from its tensors.
        self.register_buffer('_device', torch.zeros(()), persistent=False)

    def forward(
        self, inputs: list[Tensor], data_samples: list[DetDataSample], mode: str = 'predict'
    ) -> list[DetDataSample]:
        if mode != 'predict':
            raise ExportError(f'an exported detector only predicts, mode={mode!r} is not possible')
        for image, sample in zip(inputs, data_samples, strict=True):
            # Where there is a GPU, the runner moves the images to it.
            found = self.runtime.run(image[None].float().cpu().numpy())
            # Sorted by score.
            found = {name: torch.from_numpy(x[: self.settings.max_per_img]) for name, x in found.items()}
            boxes = found['boxes'] / found['boxes'].new_tensor(sample.scale_factor).repeat(2)
            instances = InstanceData(bboxes=boxes, scores=found['scores'], labels=found['labels'])
            if 'mask_logits' in found:
                logits, threshold, shape = found['mask_logits'], self.settings.mask_threshold, sample.ori_shape[:2]
                if self.mask_stride is None:
                    instances.masks = paste_masks(logits.sigmoid(), boxes, shape, threshold, self.masks)
                else:
                    instances.masks = enlarge_masks(logits, self.mask_stride, sample.scale_factor, shape, threshold)
            sample.pred_instances = instances
        return data_samples
