"""The parts of a detector that can be timed, and the one image that goes through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cv2
import mmcv
import numpy as np
import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.structures import DetDataSample
from torch import Tensor, nn

from slab_det.runtime.errors import LatencyError

NOISE = 'seeded noise'


@dataclass(frozen=True)
class EncodedImage:
    """An image as its file holds it.

    Attributes:
        name: Path of the file, or ``NOISE``.
        content: The bytes of the file.
    """

    name: str
    content: bytes

    def decode(self) -> np.ndarray:
        """(height, width, 3) uint8 in BGR, upright, as mmdet's LoadImageFromFile reads it."""
        pixels = mmcv.imfrombytes(self.content)
        if pixels is None:
            raise LatencyError(f'image {self.name} cannot be decoded')
        return pixels


def read_image(path: str | None, size: tuple[int, int]) -> EncodedImage:
    """The image at ``path``, or a JPEG of (height, width) noise, the same in every run.

    Raises:
        LatencyError: If the file is missing or is no image.
    """
    if path is None:
        return _noise(*size)
    try:
        image = EncodedImage(str(path), Path(path).read_bytes())
    except OSError as error:
        raise LatencyError(f'image {path} not found' if isinstance(error, FileNotFoundError) else str(error)) from error
    image.decode()
    return image


class MeasuredInput:
    """One image on its way into one model, as the test loop brings it there.

    Args:
        model: Its data_preprocessor normalises and pads; where it has none, to a multiple of 32.
        image: The image.
        size: (height, width) that it is resized to.
        device: Where the model is.
        dtype: What backbone and neck take.
        memory_format: Of the tensor.

    Attributes:
        tensor: (1, 3, H, W).
        samples: One data sample.
        predictions: What the detector made of it last; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        image: EncodedImage,
        size: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.image, self.size = image, tuple(size)
        self.dtype, self.memory_format = dtype, memory_format
        self.preprocess = getattr(model, 'data_preprocessor', None) or DetDataPreprocessor(
            mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True, pad_size_divisor=32
        ).to(device)
        self.predictions: list[DetDataSample] | None = None
        self.load()

    def load(self) -> None:
        """Decodes, resizes, normalises and pads the image, and brings it to the device."""
        pixels = self.image.decode()
        (height, width), ori_shape = self.size, pixels.shape[:2]
        pixels = mmcv.imresize(pixels, (width, height))
        sample = DetDataSample(
            metainfo={
                'img_id': 0,
                'img_shape': self.size,
                'ori_shape': ori_shape,
                # (width, height), as mmcv's Resize leaves it.
                'scale_factor': (width / ori_shape[1], height / ori_shape[0]),
            }
        )
        inputs = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        data = self.preprocess({'inputs': [inputs], 'data_samples': [sample]}, training=False)
        self.tensor: Tensor = data['inputs'].to(self.dtype, memory_format=self.memory_format)
        self.samples: list[DetDataSample] = data['data_samples']


@dataclass(frozen=True)
class Scope:
    """A part of the way from a file to predictions.

    Attributes:
        timed: What is inside the timed region, in words.
        forward: (model, input) -> outputs; a detector's are also left in ``input.predictions``.
        parts: The submodules that run; None where it is the whole detector.
        compiled: The submodules that torch.compile can take as one graph.
    """

    timed: str
    forward: Callable[[nn.Module, MeasuredInput], object]
    parts: tuple[str, ...] | None
    compiled: tuple[str, ...]

    def parts_of(self, model: nn.Module) -> list[nn.Module]:
        """The modules of ``model`` that run; a bare backbone is its own part."""
        return [model] if self.parts is None else [getattr(model, part, model) for part in self.parts]

    def compiled_parts_of(self, model: nn.Module) -> list[nn.Module]:
        """The modules of ``model`` that torch.compile can take."""
        return [getattr(model, part, model) for part in self.compiled]


def _predict(model: nn.Module, given: MeasuredInput) -> object:
    given.predictions = model.predict(given.tensor, given.samples, rescale=True)
    return given.predictions


def _load_and_predict(model: nn.Module, given: MeasuredInput) -> object:
    given.load()
    return _predict(model, given)


SCOPES = {
    'backbone': Scope(
        'backbone forward on a normalised, padded image',
        lambda model, given: getattr(model, 'backbone', model)(given.tensor),
        ('backbone',),
        ('backbone',),
    ),
    'backbone+neck': Scope(
        'backbone and neck forward on a normalised, padded image',
        lambda model, given: model.extract_feat(given.tensor),
        ('backbone', 'neck'),
        ('backbone', 'neck'),
    ),
    'detector': Scope(
        'detector.predict on a normalised, padded image: backbone, neck, RPN, RoI heads, NMS, masks pasted '
        'to full size; without image decoding, resizing and normalisation',
        _predict,
        None,
        ('backbone', 'neck'),
    ),
    'end-to-end': Scope(
        'from the bytes of the image file in memory to predictions on the original image: decoding, resizing, '
        'normalisation, padding, copy to the device, backbone, neck, RPN, RoI heads, NMS, masks pasted to full size',
        _load_and_predict,
        None,
        ('backbone', 'neck'),
    ),
}


@cache
def _noise(height: int, width: int) -> EncodedImage:
    pixels = torch.randint(
        0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    ).numpy()
    return EncodedImage(NOISE, cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes())
