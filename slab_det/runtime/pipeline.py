"""Runs the test pipeline of a config on an image in any form: a file, bytes, an array, an image of Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TypeAlias
from urllib.request import urlopen

import cv2
import mmcv
import numpy as np
import PIL.Image
from mmcv.transforms import LoadImageFromFile, Resize
from mmengine import fileio
from mmengine.config import Config
from mmengine.dataset import Compose

from slab_det.runtime.config import type_name, walk_datasets
from slab_det.runtime.errors import DataError

Image: TypeAlias = str | Path | bytes | np.ndarray | PIL.Image.Image


def inference_steps(cfg: Config) -> list[dict]:
    """Returns the transforms of ``test_dataloader``, or ``val_dataloader``, or of a training on a folder of pictures.

    Raises:
        DataError: If the config has none of them.
    """
    pictures = cfg.get('train_dataloader')
    if pictures and type_name(pictures.dataset.type) != 'ImageFolder':
        pictures = None
    loader = cfg.get('test_dataloader') or cfg.get('val_dataloader') or pictures
    if not loader:
        raise DataError('images as inference sees them need the pipeline of test_dataloader or val_dataloader')
    return next(dataset.pipeline for dataset in walk_datasets(loader.dataset) if 'pipeline' in dataset)


class ImagePipeline:
    """Turns an image into what a test dataset yields: 'inputs' (3, H, W) and 'data_samples'.

    Files and their bytes are decoded as the pipeline decodes files, to eight bits of BGR: OpenCV expands gray and
    palettes, leaves out alpha, converts CMYK, keeps the high byte of 16 bits, and turns JPEG, PNG and TIFF upright as
    their EXIF says. Arrays and images of Pillow are not turned. They become BGR too, and float32 unless they have eight
    bits.

    Args:
        steps: Configs of the transforms, LoadImageFromFile first, in mmengine's default scope. Annotations are not
            loaded.
        fetch_timeout: Seconds to wait for the server of an address, a name that begins with http:// or https://; 0
            refuses addresses.

    Raises:
        DataError: If the first transform is another one; when an image cannot be read or decoded, has more than
            ``PIL.Image.MAX_IMAGE_PIXELS`` pixels, which is looked up before it is decoded, holds other values than 0 to
            255, or one of the transforms fails.
    """

    def __init__(self, steps: Sequence[dict], fetch_timeout: float = 10.0) -> None:
        # LoadAnnotations would look for objects of a dataset.
        composed = Compose([step for step in steps if 'Annotations' not in type_name(step['type'])])
        self.loader, *self.transforms = composed.transforms
        if not isinstance(self.loader, LoadImageFromFile):
            raise DataError(f'the test pipeline begins with {type(self.loader).__name__}, not with LoadImageFromFile')
        self.fetch_timeout = fetch_timeout

    def __call__(self, image: Image, **values: object) -> dict:
        """Runs the transforms.

        Args:
            image: A file or an address, the bytes of a file, an image of Pillow, or an array (H, W), (H, W, 1),
                (H, W, 3) in BGR or (H, W, 4) in BGRA, 0 to 255.
            **values: Further entries for the transforms, such as ``img_id``.
        """
        name, path = 'the image', ''
        if isinstance(image, (str, Path)):
            # A string that is not a name may be long, or hold bytes that cannot be printed.
            name, path = repr(str(image)[:200])[1:-1], str(image)
            image = self._read(path, name)
        if isinstance(image, bytes):
            pixels = self._decode(image, name)
        elif isinstance(image, PIL.Image.Image):
            pixels = _as_bgr(_load(image))
        elif isinstance(image, np.ndarray):
            pixels = _as_bgr(image)
        else:
            raise DataError(f'an image is a path, bytes, an array or an image of Pillow, not a {type(image).__name__}')
        shape = pixels.shape[:2]
        # Heads need the scale factor even if no transform resizes the image.
        data = dict(values, img=pixels, img_path=path, img_shape=shape, ori_shape=shape, scale_factor=(1.0, 1.0))
        for transform in self.transforms:
            try:
                data = transform(data)
            except Exception as error:
                reason = ' '.join(str(error).split())
                if isinstance(transform, Resize) and isinstance(error, cv2.error):
                    reason = 'a side is too short, or too long, to be resized'
                raise DataError(
                    f'{name}, {shape[0]}x{shape[1]} (HxW), does not pass the test pipeline: '
                    f'{reason} ({type(transform).__name__})'
                ) from error
        return data

    def _read(self, path: str, name: str) -> bytes:
        is_address = path.startswith(('http://', 'https://'))
        if is_address and not self.fetch_timeout:
            raise DataError(f'{name} is an address, and fetch_timeout=0 refuses addresses: give the bytes of the file')
        try:
            if not is_address:
                return fileio.get(path, self.loader.backend_args)
            with urlopen(path, timeout=self.fetch_timeout) as response:
                return response.read()
        except Exception as error:
            reason = getattr(error, 'strerror', None) or error
            raise DataError(f'{name} cannot be read ({type(error).__name__}: {reason}): give a file') from error

    def _decode(self, content: bytes, name: str) -> np.ndarray:
        try:
            # The header alone: an image that is too large is never decoded, nor one of unknown size.
            with PIL.Image.open(BytesIO(content)) as image:
                num_pixels, kind = image.width * image.height, (image.format, image.mode)
        except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
            num_pixels, kind = float('inf'), None
        except Exception:
            num_pixels, kind = 0, None
        _check_count(num_pixels, name)
        # OpenCV would cut floats to eight bits, and make noise of a TIFF of 32 bits.
        if kind in (('TIFF', 'I'), ('TIFF', 'F'), ('PPM', 'F')):
            raise DataError(f'{name} has 32 bits per value: give an array of 0 to 255, or a file of 8 or 16 bits')
        pixels = None
        with suppress(Exception):
            if num_pixels:
                pixels = mmcv.imfrombytes(content, self.loader.color_type, backend=self.loader.imdecode_backend)
        if pixels is None:
            raise DataError(f'{name} is no image of 8 or 16 bits that can be decoded, or a damaged one')
        return pixels.astype(np.float32) if self.loader.to_float32 else pixels


def check_range(image: np.ndarray) -> None:
    """Raises DataError unless the values of an array, of any shape, round to 0 to 255.

    A detector finds anything in other values. An array whose largest value is below 4 is taken for one of 0 to 1,
    unless it is black.
    """
    if image.dtype == np.uint8:
        return
    if image.dtype.kind not in 'biuf':
        raise DataError(f'the image is an array of {image.dtype}: give uint8, or other numbers from 0 to 255')
    low, high = float(image.min()), float(image.max())
    # NaN compares as False.
    if not (-0.5 <= low and (high == 0 or 4 <= high) and high < 255.5):
        raise DataError(
            f'the image, {image.dtype}, has values from {low:g} to {high:g}: give 0 to 255; multiply 0 to 1 by 255, '
            'divide 16 bits by 257, undo a normalization'
        )


def _as_bgr(image: np.ndarray) -> np.ndarray:
    """Returns an array with three channels, uint8 or float32, which are the types that OpenCV resizes."""
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or 0 in image.shape:
        raise DataError(
            f'an array has the shape (height, width) or (height, width, channels), of 1, 3 or 4 channels, and not '
            f'{image.shape}: give image.transpose(1, 2, 0) of (channels, height, width), and several images as a list'
        )
    image = image[..., :3]
    check_range(image)
    image = image.repeat(3, 2) if image.shape[2] == 1 else image
    return image if image.dtype == np.uint8 else image.astype(np.float32)


def _load(image: PIL.Image.Image) -> np.ndarray:
    """Returns an image of Pillow as an array: (H, W, 3) in BGR, or (H, W) if a pixel has more than eight bits."""
    _check_count(image.width * image.height, 'the image')
    try:
        # Pillow's convert() would cut more than eight bits to 255.
        return np.asarray(image) if image.mode[0] in 'IF' else np.asarray(image.convert('RGB'))[..., ::-1]
    except Exception as error:
        raise DataError(f'the image of Pillow cannot be decoded ({error}): it may be damaged') from error


def _check_count(num_pixels: float, name: str) -> None:
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit and num_pixels > limit:
        raise DataError(
            f'{name} has more than {limit:,} pixels: give a smaller one, or raise the limit, PIL.Image.MAX_IMAGE_PIXELS'
        )
