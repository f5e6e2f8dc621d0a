"""CheckedDataPreprocessor: mmdet's preprocessor with a check of images that are given as arrays."""

from __future__ import annotations

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.registry import MODELS

from slab_det.common.errors import DataError
from slab_det.common.pipeline import check_range


@MODELS.register_module()
class CheckedDataPreprocessor(DetDataPreprocessor):
    """mmdet's DetDataPreprocessor; in inference it refuses arrays that are not images with values of 0 to 255.

    mmdet would accept such an array, and return wrong detections.

    Raises:
        DataError: If an array has too few or too many channels, or values outside of 0 to 255.
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        if not training and self._enable_normalize:
            for image, sample in zip(data['inputs'], data.get('data_samples') or (), strict=False):
                # mmdet sets the path of an image that comes from a file; such an image has the right range.
                if sample.get('img_path') is not None:
                    continue
                if not len(self.mean) <= len(image) <= 4:
                    raise DataError(
                        f'the image has {len(image)} channels, expected {len(self.mean)}, channels last: give '
                        'image.transpose(1, 2, 0), or cv2.cvtColor(image, cv2.COLOR_GRAY2BGR) of a gray image'
                    )
                check_range(image[: len(self.mean)].cpu().numpy())
        return super().forward(data, training)
