"""Compares the sizes of images that a COCO file states with those of the images themselves."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import mmcv
from mmengine.logging import MMLogger
from PIL import ExifTags, Image

from slab_det.common.errors import DataError
from slab_det.preflight.annotations import CocoFile

# A header takes about 0.1 ms on a disk, and 10 ms over a network.
MAX_READ = 500
# In large sets a few sizes are wrong where the boxes are right. A cause that spoils the boxes is in more images.
MAX_WRONG = 0.05
# Orientations that exchange width and height.
TURNED = (5, 6, 7, 8)


class Header(NamedTuple):
    """(width, height) of an image, as it is stored and as its EXIF orientation turns it.

    Attributes:
        stored: The size before.
        upright: The size after.
        certain: Whether a loader's settings say which of both it reads: OpenCV turns some formats, and others not.
    """

    stored: tuple[int, int]
    upright: tuple[int, int]
    certain: bool


def check_image_sizes(coco: CocoFile, folder: str, loader: dict, with_masks: bool) -> None:
    """Checks width and height against the headers of all images, or of 500 that are evenly spaced.

    Up to 5 % of wrong sizes are a warning, unless masks are read, which have to have the size of their image.

    Args:
        coco: The file.
        folder: What its file names are relative to.
        loader: The config of LoadImageFromFile, which says whether images are turned by their EXIF orientation.
        with_masks: Whether the training or the evaluation reads masks.

    Raises:
        DataError: If more sizes differ, because images are turned or because they were resized. Boxes would lie beside
            their objects.
    """
    color, backend = loader.get('color_type', 'color'), loader.get('imdecode_backend', 'cv2')
    turns = backend in (None, 'cv2', 'pillow') and color in ('color', 'grayscale')
    images = [*coco.images.values()]
    step = max(len(images) / MAX_READ, 1.0)
    images = [images[int(i * step)] for i in range(min(len(images), MAX_READ))]
    suspects, wrong, message = [], 0, ''
    for image in images:
        path = Path(folder, image['file_name'])
        header = read_header(path)
        if header and not (header.certain and _agree(header.upright if turns else header.stored, image)):
            suspects.append((path, image, header))
    for done, (path, image, header) in enumerate(suspects):
        pixels = mmcv.imfrombytes(path.read_bytes(), color, backend=backend)
        if pixels is None or _agree(size := pixels.shape[1::-1], image):
            continue
        stated = (image['width'], image['height'])
        message = message or (
            f'{path.name} is read as {size[0]}x{size[1]} (width x height), not as {stated[0]}x{stated[1]}'
            f'{_explain(stated, size, header.stored != header.upright, color, turns)}'
        )
        wrong += 1
        if with_masks or wrong > len(images) * MAX_WRONG:
            # Reading the others would take long.
            raise DataError(_tell(coco, wrong + len(suspects) - done - 1, images, message))
    if wrong:
        MMLogger.get_current_instance().warning(_tell(coco, wrong, images, message))


def _tell(coco: CocoFile, wrong: int, images: list[dict], message: str) -> str:
    return f'{coco.where}: width and height of {wrong} of {len(images)} images are not those of the files: {message}'


def read_header(path: Path) -> Header | None:
    """Reads the header of an image file; None if Pillow cannot, as the loader of the images names broken ones."""
    try:
        with Image.open(path) as image:
            # Pillow decodes a whole PNG to look for EXIF behind the pixels.
            searched = image.format != 'PNG' or 'exif' in image.info
            orientation = image.getexif().get(ExifTags.Base.Orientation) if searched else None
            sizes = image.size, image.size[::-1] if orientation in TURNED else image.size
            # Pillow turns the size of a TIFF by itself.
            sizes = sizes[::-1] if image.format == 'TIFF' else sizes
            # OpenCV turns some of the other formats.
            return Header(*sizes, certain=image.format == 'JPEG' or sizes[0] == sizes[1])
    except Exception:
        return None


def _agree(size: tuple[int, int], image: dict) -> bool:
    # Tools round a size up or down.
    return abs(size[0] - image['width']) <= 1 and abs(size[1] - image['height']) <= 1


def _explain(stated: tuple[int, int], size: tuple[int, int], has_orientation: bool, color: str, turns: bool) -> str:
    if 0 in stated:
        return ': give the sizes of the files'
    if stated != size[::-1]:
        return (
            '. The images were resized after they were labelled, or the annotations are of other images: multiply '
            f'boxes, masks, width and height by {size[0] / stated[0]:.3g}, or give the original images'
        )
    if not has_orientation:
        return ': width and height are exchanged'
    if not turns:
        return (
            f". The file has an EXIF orientation, and LoadImageFromFile(color_type='{color}') does not turn it: set "
            "color_type='color'"
        )
    return (
        '. LoadImageFromFile turns it by its EXIF orientation, and the annotations are of the raw pixels: set '
        f"color_type='{color}_ignore_orientation' in every LoadImageFromFile; or, if the boxes are right and only "
        'width and height are the raw ones, exchange these'
    )
