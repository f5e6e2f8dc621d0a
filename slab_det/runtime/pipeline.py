"""The test pipeline of a config, for an image in any form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import cv2
import mmcv
import numpy as np
from mmcv.transforms import LoadImageFromFile, Resize
from mmengine import fileio
from mmengine.config import Config
from mmengine.dataset import Compose

from slab_det.runtime.config import type_name
from slab_det.runtime.errors import DataError

Image: TypeAlias = str | Path | bytes | np.ndarray


def inference_steps(cfg: Config) -> list[dict]:
    """Configs of the transforms of ``test_dataloader``, or ``val_dataloader``, or a training on a folder of pictures.

    Raises:
        DataError: If the config has none of them.
    """
    pictures = cfg.get('train_dataloader')
    if pictures and type_name(pictures.dataset.type) != 'ImageFolder':
        pictures = None
    loader = cfg.get('test_dataloader') or cfg.get('val_dataloader') or pictures
    if not loader:
        raise DataError('images as inference sees them need the pipeline of test_dataloader or val_dataloader')
    source = loader.dataset
    while 'pipeline' not in source:
        source = source['dataset'] if 'dataset' in source else source['datasets'][0]
    return source['pipeline']


class ImagePipeline:
    """Makes of an image what a test dataset yields: 'inputs' (3, H, W) and 'data_samples'.

    Files and their bytes are decoded as the pipeline decodes files, to eight bits of BGR: OpenCV expands gray and
    palettes, leaves out alpha, converts CMYK, keeps the high byte of 16 bits, and turns JPEG, PNG and TIFF upright as
    their EXIF says. An array becomes BGR too, and float32 unless it is uint8.

    Args:
        steps: Configs of the transforms, LoadImageFromFile first, in mmengine's default scope. Annotations are not
            loaded.

    Raises:
        DataError: If the first is another; when an image is no image, cannot be decoded, or one of the transforms
            fails.
    """

    def __init__(self, steps: Sequence[dict]) -> None:
        # LoadAnnotations would look for objects of a dataset.
        composed = Compose([step for step in steps if 'Annotations' not in type_name(step['type'])])
        self.loader, *self.transforms = composed.transforms
        if not isinstance(self.loader, LoadImageFromFile):
            raise DataError(f'the test pipeline begins with {type(self.loader).__name__}, not with LoadImageFromFile')

    def __call__(self, image: Image, **values: object) -> dict:
        """Runs the transforms.

        Args:
            image: A file or an address, the bytes of a file, or an array (H, W), (H, W, 1), (H, W, 3) in BGR or
                (H, W, 4) in BGRA, 0 to 255.
            **values: What the transforms get besides, such as ``img_id``.
        """
        name = str(image) if isinstance(image, (str, Path)) else 'the image'
        if isinstance(image, np.ndarray):
            # None tells an array from a file, see check_image.
            pixels, path = _as_bgr(image), None
        elif isinstance(image, (str, Path, bytes)):
            is_path = not isinstance(image, bytes)
            pixels = self._decode(fileio.get(name, self.loader.backend_args) if is_path else image, name)
            path = name if is_path else ''
        else:
            raise DataError(f'an image is a path, bytes or a numpy array, not a {type(image).__name__}')
        shape = pixels.shape[:2]
        # Heads ask for the scale also where nothing is resized.
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

    def _decode(self, content: bytes, name: str) -> np.ndarray:
        try:
            pixels = mmcv.imfrombytes(content, self.loader.color_type, backend=self.loader.imdecode_backend)
        except Exception:
            pixels = None
        if pixels is None:
            raise DataError(f'{name} does not pass the test pipeline: it is no image, or a damaged one')
        if content[:2] in (b'II', b'MM'):
            # Of a TIFF in other numbers OpenCV makes noise.
            kind = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED).dtype
            if kind not in (np.uint8, np.uint16):
                raise DataError(f'{name} is a TIFF of {kind}: give an array of 0 to 255, or a file of 8 or 16 bits')
        return pixels.astype(np.float32) if self.loader.to_float32 else pixels


def _as_bgr(image: np.ndarray) -> np.ndarray:
    """An array in three channels; uint8 or float32, which OpenCV resizes."""
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or 0 in image.shape:
        raise DataError(
            f'an array has the shape (height, width) or (height, width, channels), of 1, 3 or 4 channels, and not '
            f'{image.shape}: give image.transpose(1, 2, 0) of (channels, height, width), and several images as a list'
        )
    image = image.repeat(3, 2) if image.shape[2] == 1 else image[..., :3]
    return image if image.dtype == np.uint8 else image.astype(np.float32)
