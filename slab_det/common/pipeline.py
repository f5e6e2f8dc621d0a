"""Runs the test pipeline of a config on an image in any form: a file, bytes, an array, a Pillow image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TypeAlias

import cv2
import mmcv
import numpy as np
import PIL.Image
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from mmengine.dataset import Compose

from slab_det.common.config import type_name, walk_datasets
from slab_det.common.errors import DataError, describe_reason

Image: TypeAlias = str | Path | bytes | np.ndarray | PIL.Image.Image


def find_test_pipeline(cfg: Config) -> list[dict]:
    """Returns the transforms of ``test_dataloader``, else of ``val_dataloader``, else of training on an ImageFolder.

    Raises:
        DataError: If the config has none of them.
    """
    pictures = cfg.get('train_dataloader')
    if pictures and type_name(pictures.dataset.type) != 'ImageFolder':
        pictures = None
    loader = cfg.get('test_dataloader') or cfg.get('val_dataloader') or pictures
    if not loader:
        raise DataError('the config has no test pipeline; add a test_dataloader or val_dataloader')
    return next(dataset.pipeline for dataset in walk_datasets(loader.dataset) if 'pipeline' in dataset)


class ImagePipeline:
    """Turns an image into a sample of a test dataset: 'inputs' (3, H, W) and 'data_samples'.

    OpenCV decodes files and bytes as in training, to 8-bit BGR: it expands gray and palettes, drops alpha, keeps the
    high byte of 16-bit values, and rotates JPEG, PNG and TIFF by their EXIF orientation. Arrays and Pillow images are
    not rotated. With ``color_type='grayscale'`` of LoadImageFromFile every image becomes gray, with 'unchanged' it
    keeps its channels.

    Args:
        steps: Configs of the transforms, LoadImageFromFile first, in mmengine's default scope. Transforms of
            annotations are left out.

    Raises:
        DataError: If the first transform is not LoadImageFromFile. When called: if an image cannot be read or
            decoded, has values outside of 0 to 255, or a transform fails.
    """

    def __init__(self, steps: Sequence[dict]) -> None:
        composed = Compose([step for step in steps if 'Annotations' not in type_name(step['type'])])
        self.loader, *self.transforms = composed.transforms
        if not isinstance(self.loader, LoadImageFromFile):
            raise DataError(f'the test pipeline begins with {type(self.loader).__name__}, not with LoadImageFromFile')

    def __call__(self, image: Image, **values: object) -> dict:
        """Runs the transforms.

        Args:
            image: A file, the bytes of a file, a Pillow image, or an array (H, W), (H, W, 1), (H, W, 3) in BGR or
                (H, W, 4) in BGRA, 0 to 255.
            **values: Further entries for the transforms, such as ``img_id``.
        """
        path, name = '', 'the image'
        try:
            if isinstance(image, (str, Path)):
                path, name = str(image), str(image) or "''"
                # Path('') would be the current folder.
                with open(path, 'rb') as file:
                    image = file.read()
            pixels = self._decode(image)
        except (OSError, ValueError, cv2.error) as error:
            reason = ' '.join(str(getattr(error, 'strerror', None) or error).split())
            raise DataError(f'{name} cannot be read ({reason}): give an image file, or its bytes') from error
        shape = pixels.shape[:2]
        # Heads need the scale factor even if no transform resizes the image.
        data = dict(values, img=pixels, img_path=path, img_shape=shape, ori_shape=shape, scale_factor=(1.0, 1.0))
        for transform in self.transforms:
            try:
                data = transform(data)
            except Exception as error:
                raise DataError(
                    f'{name}, {shape[0]}x{shape[1]} (HxW), fails in {type(transform).__name__} of the test '
                    f'pipeline: {describe_reason(error)}'
                ) from error
        return data

    def _decode(self, image: Image) -> np.ndarray:
        """Returns an image as the loader does: (H, W, 3) in BGR, or (H, W) if it is gray; uint8 or float32."""
        if isinstance(image, bytes):
            _check_header(image)
            pixels = mmcv.imfrombytes(image, self.loader.color_type, backend=self.loader.imdecode_backend)
            if pixels is None:
                raise ValueError('damaged, or in a format that OpenCV does not decode')
            return pixels.astype(np.float32) if self.loader.to_float32 else pixels
        is_unchanged = self.loader.color_type == 'unchanged'
        if isinstance(image, PIL.Image.Image):
            image = _pillow_pixels(image, is_unchanged)
        if not isinstance(image, np.ndarray):
            raise DataError(f'an image is a path, bytes, an array or a Pillow image, not a {type(image).__name__}')
        image = image[..., None] if image.ndim == 2 else image
        if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or 0 in image.shape:
            raise DataError(
                f'an array has the shape (height, width, channels), not {image.shape}: give image.transpose(1, 2, 0) '
                'of (channels, height, width), and several images as a list'
            )
        image = image if is_unchanged else image[..., :3]
        check_range(image)
        # OpenCV resizes uint8 and float32, but not every other dtype.
        is_float = self.loader.to_float32 or image.dtype != np.uint8
        image = image.astype(np.float32) if is_float else image
        if image.shape[2] == 1:
            return image.repeat(3, 2) if self.loader.color_type.startswith('color') else image[..., 0]
        if self.loader.color_type.startswith('grayscale'):
            return cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_BGR2GRAY)
        return image


def _pillow_pixels(image: PIL.Image.Image, is_unchanged: bool) -> np.ndarray:
    """The pixels of a Pillow image in BGR; with ``is_unchanged`` a gray one stays gray, and RGBA becomes BGRA."""
    # convert() would clip values of more than eight bits to 255.
    if image.mode[0] in 'IF':
        return np.asarray(image)
    mode = {'1': 'L', 'L': 'L', 'RGBA': 'RGBA'}.get(image.mode, 'RGB') if is_unchanged else 'RGB'
    pixels = np.array(image.convert(mode))
    return pixels if pixels.ndim == 2 else pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]


def check_range(image: np.ndarray) -> None:
    """Raises DataError unless all values of an array round to 0 to 255.

    On other values, detections would be wrong without an error. A largest value below 4 counts as an image from 0 to
    1 and is refused, unless the largest value is 0.
    """
    if image.dtype == np.uint8:
        return
    # Of complex numbers NumPy would drop a part, and objects may not compare.
    if image.dtype.kind not in 'buif':
        raise DataError(f'an array of {image.dtype} is no image: give whole numbers or floats from 0 to 255')
    low, high = float(image.min()), float(image.max())
    # NaN compares as False.
    if not (-0.5 <= low and (high == 0 or 4 <= high) and high < 255.5):
        raise DataError(
            f'the image has values from {low:g} to {high:g} ({image.dtype}): give 0 to 255; multiply 0 to 1 by 255, '
            'divide 16 bits by 257, undo a normalization'
        )


def _check_header(content: bytes) -> None:
    """Raises ValueError, before decoding, for a file with 32-bit values or with more pixels than Pillow's limit."""
    try:
        with PIL.Image.open(BytesIO(content)) as image:
            num_pixels, kind = image.width * image.height, (image.format, image.mode)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        num_pixels, kind = math.inf, None
    except Exception as error:
        raise ValueError('damaged, or not an image of 8 or 16 bits') from error
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit and num_pixels > limit:
        raise ValueError(f'more than {limit:,} pixels, the limit PIL.Image.MAX_IMAGE_PIXELS')
    # OpenCV would clip floats to eight bits, and decode a 32-bit TIFF as noise.
    if kind in (('TIFF', 'I'), ('TIFF', 'F'), ('PPM', 'F')):
        raise ValueError('32 bits per value, not 8 or 16')
