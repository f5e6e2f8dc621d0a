"""Generated images of shapes in COCO format: a detection task that is learnt in minutes, without a download.

Every image shows a few filled shapes over a textured, nearly grey background. Classes differ in outline and in their
typical hue, which overlaps with the hues of other classes. Shapes may overlap, and the border may cut them. An
annotation holds the polygons of the visible part.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from pycocotools import mask as coco_mask

from slab_det.common.errors import DataError

CLASSES = ('circle', 'square', 'triangle', 'star')
# Part of the cache key: increase it with every change of a pixel or an annotation.
GENERATOR_VERSION = 2
# A shape is not drawn where it would hide more than half of the visible part of another one.
MIN_VISIBLE = 0.5
# In pixels across, at every image size.
OBJECT_SIZE = (28, 76)
OBJECTS_PER_IMAGE = (2, 4)


def generate(
    root: str | Path | None = None,
    num_train: int = 400,
    num_val: int = 100,
    size: Sequence[int] = (192, 160),
    seed: int = 0,
) -> Path:
    """Writes images and annotations, unless the folder holds them already, and returns the folder.

    The folder contains ``images/{train,val}/*.png`` and ``annotations/instances_{train,val}.json``. It is renamed into
    place when it is complete, so several processes may call this function at once.

    Args:
        root: The folder. None means ``synthetic-<key>`` in the cache folder: ``$SLAB_DET_CACHE``, or ``slab_det`` in
            ``$XDG_CACHE_HOME`` (``~/.cache``).
        num_train: Images of the train split.
        num_val: Images of the val split.
        size: (width, height) of every image in pixels.
        seed: The same seed gives the same bytes, with the same versions of numpy and OpenCV.

    Raises:
        DataError: If ``root`` exists and was not generated with these arguments.
    """
    spec = dict(version=GENERATOR_VERSION, num_train=num_train, num_val=num_val, size=list(size), seed=seed)
    spec['key'] = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:12]
    if root is None:
        cache = os.environ.get('XDG_CACHE_HOME', '~/.cache') + '/slab_det'
        root = Path(os.environ.get('SLAB_DET_CACHE', cache)).expanduser() / f'synthetic-{spec["key"]}'
    root = Path(root)
    is_empty = root.is_dir() and not any(root.iterdir())
    if is_empty or not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f'.{root.name}-', dir=root.parent) as folder:
            building = Path(folder) / root.name
            building.mkdir()
            _write_splits(building, spec)
            try:
                building.rename(root)
            except OSError:
                # Another process may have created the folder.
                if not root.exists():
                    raise
    marker = root / 'generator.json'
    found = json.loads(marker.read_text()) if marker.is_file() else {}
    if found.get('key') != spec['key']:
        raise DataError(f'{root} was generated with {found or "other tools"}, not with {spec}; choose another folder')
    return root


@DATASETS.register_module()
class SyntheticShapes(CocoDataset):
    """CocoDataset of generated images, which are written on first use.

    Args:
        split: 'train' or 'val'.
        data_root: A folder that :func:`generate` wrote; None generates it in the cache folder.
        generator: Arguments of :func:`generate` besides ``root``; the same for both splits.
        kwargs: Arguments of CocoDataset. ``ann_file`` and ``data_prefix`` follow from ``split``.
    """

    # The palette has the typical hues of the classes.
    METAINFO = {'classes': CLASSES, 'palette': [(220, 50, 50), (135, 200, 40), (40, 190, 200), (140, 70, 220)]}

    def __init__(self, split: str, data_root: str | None = None, generator: dict | None = None, **kwargs) -> None:
        if data_root is None:
            data_root = str(generate(**(generator or {})))
        super().__init__(
            data_root=data_root,
            ann_file=f'annotations/instances_{split}.json',
            data_prefix={'img': f'images/{split}/'},
            **kwargs,
        )


def _write_splits(root: Path, spec: dict) -> None:
    width, height = spec['size']
    (root / 'annotations').mkdir()
    categories = [{'id': i, 'name': name, 'supercategory': 'shape'} for i, name in enumerate(CLASSES, start=1)]
    for split_index, split in enumerate(('train', 'val')):
        folder = root / 'images' / split
        folder.mkdir(parents=True)
        images, annotations = [], []
        for index in range(spec[f'num_{split}']):
            # One random stream per image: with more images the first ones stay the same.
            rng = np.random.default_rng([spec['seed'], split_index, index])
            pixels, objects = draw_image(rng, (width, height))
            file_name = f'{index:05d}.png'
            if not cv2.imwrite(str(folder / file_name), pixels):
                raise DataError(f'{folder / file_name} cannot be written; check the space on the disk')
            image_id = index + 1
            images.append({'id': image_id, 'file_name': file_name, 'width': width, 'height': height})
            for found in objects:
                annotations.append({'id': len(annotations) + 1, 'image_id': image_id, 'iscrowd': 0, **found})
        content = {'images': images, 'annotations': annotations, 'categories': categories}
        (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))
    (root / 'generator.json').write_text(json.dumps(spec, indent=1))


def draw_image(rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, list[dict]]:
    """Draws one image of ``size`` (width, height).

    Returns:
        The image as (H, W, 3) uint8, BGR, and the COCO annotation of each object, without ids.
    """
    # Nearly grey, so that a detector trained from scratch for minutes finds the objects.
    pixels = _texture(rng, size, contrast=10.0) + rng.uniform(50, 205) + rng.normal(0.0, 8.0, 3)
    placed: list[tuple[int, np.ndarray]] = []  # class index, visible mask
    for _ in range(rng.integers(OBJECTS_PER_IMAGE[0], OBJECTS_PER_IMAGE[1] + 1)):
        label = int(rng.integers(len(CLASSES)))
        mask = _shape(rng, label, size)
        visible = [(other, seen & ~mask) for other, seen in placed]
        if mask.sum() < 150 or any(
            after.sum() < MIN_VISIBLE * before.sum() for (_, after), (_, before) in zip(visible, placed, strict=True)
        ):
            continue
        placed = [*visible, (label, mask)]
        surface = _texture(rng, size, contrast=12.0) + _colour(rng, label)
        pixels = np.where(mask[..., None], surface, pixels)
    noisy = pixels + rng.normal(0.0, 6.0, pixels.shape)
    annotations = [found for label, mask in placed if (found := _annotation(label, mask)) is not None]
    return np.clip(noisy, 0, 255).astype(np.uint8), annotations


def _texture(rng: np.random.Generator, size: tuple[int, int], contrast: float) -> np.ndarray:
    """Returns smooth random blotches, (H, W, 3), zero mean, in grey levels."""
    cells = int(rng.integers(3, 14))
    coarse = rng.normal(0.0, contrast, (cells, cells, 3))
    return cv2.resize(coarse, size, interpolation=cv2.INTER_CUBIC)


def _colour(rng: np.random.Generator, label: int) -> np.ndarray:
    """Returns a saturated colour, BGR in [0, 255], whose hue scatters by 20 degrees around the hue of the class."""
    hue = (label * 360 / len(CLASSES) + rng.normal(0.0, 20.0)) % 360
    # HSV of floats in OpenCV: hue in degrees, saturation and value in [0, 1].
    hsv = np.array([[[hue, rng.uniform(0.6, 1.0), rng.uniform(0.5, 1.0)]]], np.float32)
    return 255 * cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0]


def _shape(rng: np.random.Generator, label: int, size: tuple[int, int]) -> np.ndarray:
    """Returns the mask (H, W) of one randomly sized, stretched, rotated and placed shape."""
    radius = rng.uniform(*OBJECT_SIZE) / 2
    # Distances of the corners from the centre, for each class.
    radii = (np.full(48, 1.0), np.full(4, 1.15), np.full(3, 1.2), np.tile([1.2, 0.5], 5))[label]
    angles = np.arange(len(radii)) * 2 * np.pi / len(radii)
    points = np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None] * radius
    stretch = np.diag([1.0, rng.uniform(0.8, 1.0)])
    turn = rng.uniform(0, 2 * np.pi)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    # The centre stays inside the image: at least about a quarter of a shape is seen.
    centre = rng.uniform((0.3 * radius, 0.3 * radius), np.asarray(size) - 0.3 * radius)
    outline = points @ stretch @ rotation.T + centre
    mask = np.zeros((size[1], size[0]), np.uint8)
    cv2.fillPoly(mask, [np.round(outline).astype(np.int32)], 1)
    return mask.astype(bool)


def _annotation(label: int, mask: np.ndarray) -> dict | None:
    """Returns the COCO annotation of a visible mask (H, W), or None if only slivers are visible."""
    # OpenCV's contours pass through pixel centres, COCO's polygons enclose pixels. At four times the resolution the
    # difference moves no pixel of the rasterised polygon.
    scale = 4
    fine = cv2.resize(mask.astype(np.uint8), None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)
    contours, _ = cv2.findContours(fine, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    contours = [cv2.approxPolyDP(contour, 0.4 * scale, closed=True) for contour in contours]
    # Slivers of a few pixels, which another shape cuts off, are left out.
    polygons = [
        ((contour.reshape(-1) + 0.5) / scale).tolist()
        for contour in contours
        if cv2.contourArea(contour) >= 8 * scale**2
    ]
    if not polygons:
        return None
    encoded = coco_mask.merge(coco_mask.frPyObjects(polygons, *mask.shape))
    # Area and box of the polygons, not of `mask`: training and evaluation rasterise the polygons.
    return {
        'category_id': label + 1,
        'segmentation': polygons,
        'bbox': coco_mask.toBbox(encoded).tolist(),
        'area': float(coco_mask.area(encoded)),
    }
