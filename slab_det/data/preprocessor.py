"""Refuses arrays whose pixels are not in the range that a detector was trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from torch import Tensor

from slab_det.runtime.errors import DataError

# The largest value of an image over the mean that is subtracted; images of 0 to 255 have up to 2.5, and those of 0 to 1
# and of 16 bits are far outside.
LEAST, MOST = 0.03, 5.0


def check_image(image: Tensor, sample: DetDataSample, mean: Sequence[float] | Tensor) -> None:
    """Raises DataError for an array of other channels, or of another range of values, than images of the training.

    mmdet would go on, and the detector would find anything; of BGRA it leaves out A. Files are taken as they are: they
    are read as 0 to 255, and what distorts colours may leave little of a dark one. So is uint8, and a black array.

    Args:
        image: (C, H, W).
        sample: What belongs to it; its ``img_path`` tells whether it came from a file.
        mean: What the detector subtracts from each channel.
    """
    if sample.get('img_path') is not None:
        return
    if not len(mean) <= len(image) <= 4:
        raise DataError(
            f'the image has {len(image)} of {len(mean)} channels, which come last: give (height, width, channels), '
            'image.transpose(1, 2, 0) of (channels, height, width); a gray one becomes one of three by '
            'cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)'
        )
    if image.dtype is torch.uint8:
        return
    high, usual = image.float().max().item(), float(max(mean, default=0))
    if usual > 0 and high != 0 and not LEAST * usual < high < MOST * usual:
        raise DataError(
            f'the image, {str(image.dtype).removeprefix("torch.")}, has values up to {high:g}, and those that the '
            f'detector was trained on have a mean of {usual:g}: give 0 to 255; multiply 0 to 1 by 255, divide 16 bits '
            'by 257'
        )


@MODELS.register_module()
class CheckedDataPreprocessor(DetDataPreprocessor):
    """mmdet's DetDataPreprocessor that looks at arrays first, in inference; see :func:`check_image`."""

    def forward(self, data: dict, training: bool = False) -> dict:
        if not training and self._enable_normalize:
            for image, sample in zip(data['inputs'], data.get('data_samples') or (), strict=False):
                check_image(image, sample, self.mean)
        return super().forward(data, training)
