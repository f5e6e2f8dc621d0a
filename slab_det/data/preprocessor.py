"""mmdet's preprocessor with a check: it refuses arrays that are not images of 0 to 255."""

from __future__ import annotations

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.registry import MODELS

from slab_det.runtime.errors import DataError
from slab_det.runtime.pipeline import check_range


@MODELS.register_module()
class CheckedDataPreprocessor(DetDataPreprocessor):
    """mmdet's DetDataPreprocessor, which in inference checks images that come as arrays.

    In arrays of other values a detector finds anything. The alpha channel of BGRA is ignored. Images that come from
    files are not checked: mmdet reads them as 0 to 255.

    Raises:
        DataError: If an array has another number of channels, or values outside of 0 to 255, see
            :func:`~slab_det.runtime.pipeline.check_range`.
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        if not training and self._enable_normalize:
            for image, sample in zip(data['inputs'], data.get('data_samples') or (), strict=False):
                # mmdet sets no path for an array.
                if sample.get('img_path') is not None:
                    continue
                if not len(self.mean) <= len(image) <= 4:
                    raise DataError(
                        f'the image has {len(image)} of {len(self.mean)} channels, which come last: give '
                        'image.transpose(1, 2, 0), or of a gray one cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)'
                    )
                check_range(image[: len(self.mean)].cpu().numpy())
        return super().forward(data, training)
