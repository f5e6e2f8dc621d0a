"""Composes a detection data set whose classes look alike: sprites on photographs, in COCO format with masks.

    python -m benchmarks.hard.make_data --sprites data/sprites --photographs data/coco --out data/hard

SPRITES has a folder of PNG files with an alpha channel for each class: see benchmarks/hard/sprites.py. PHOTOGRAPHS is
any folder of JPEG files, which this repository does not have; the studies took those of COCO 2017 that photographs.txt
names. Every fifth photograph is behind validation images alone, but train and val share the sprites.

Sprites are rotated, recoloured and overlap; contrast, colour cast, blur and noise differ from image to image. The
folder also gets crops of the training objects, crops/{train,val}/CLASS/*.jpg, which a classifier starts from.
The same seed gives the same images, with the same versions of numpy and OpenCV. 1,000 images take about 30 seconds.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from pycocotools import mask as coco_mask

SIZE = 320
OBJECTS = (3, 8)
# The longer side of a sprite in pixels, log-uniform.
LENGTH = (36, 140)
# An object that shows less of itself, or fewer pixels, is left out of the image and of the annotations.
MIN_VISIBLE, MIN_PIXELS = 0.25, 60
CROP = 56


class Sprite(NamedTuple):
    """A picture of a class: ``colour`` (H, W, 3) in 0 to 255, ``alpha`` (H, W, 1) in 0 to 1."""

    label: int
    colour: np.ndarray
    alpha: np.ndarray


def read_sprites(folder: Path) -> tuple[list[str], list[list[Sprite]]]:
    """The names of the classes, and the sprites of each, trimmed to what is visible."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    sprites: list[list[Sprite]] = []
    for label, name in enumerate(classes):
        pictures = [cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in sorted((folder / name).glob('*.png'))]
        if not pictures or any(picture is None or picture.shape[2:] != (4,) for picture in pictures):
            raise SystemExit(f'{folder / name} needs PNG files, each with an alpha channel')
        sprites.append([])
        for picture in pictures:
            rows, columns = np.nonzero(picture[..., 3] > 127)
            seen = picture[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].astype(np.float32)
            sprites[-1].append(Sprite(label, seen[..., :3], seen[..., 3:] / 255))
    return classes, sprites


def draw_background(photographs: list[Path], rng: np.random.Generator) -> np.ndarray:
    """A square of a photograph, maybe mirrored, with other contrast, brightness and colour cast."""
    photograph = cv2.imread(str(photographs[rng.integers(len(photographs))]))
    side = int(min(photograph.shape[:2]) * rng.uniform(0.45, 1))
    top, left = (rng.integers(length - side + 1) for length in photograph.shape[:2])
    image = photograph[top : top + side, left : left + side][:, :: rng.choice([-1, 1])]
    image = cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_AREA).astype(np.float32)
    image = (image - image.mean()) * rng.uniform(0.5, 1.4) + image.mean() + rng.uniform(-50, 50)
    return image * rng.uniform(0.8, 1.2, 3).astype(np.float32)


def recolour(colour: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another hue (within 12 degrees), saturation, contrast and brightness."""
    hue, saturation, value = cv2.split(cv2.cvtColor(colour / 255, cv2.COLOR_BGR2HSV))
    hue = (hue + rng.uniform(-12, 12)) % 360
    saturation = np.clip(saturation * rng.uniform(0.6, 1.2), 0, 1)
    colour = cv2.cvtColor(cv2.merge([hue, saturation, value]).astype(np.float32), cv2.COLOR_HSV2BGR) * 255
    return (colour - 128) * rng.uniform(0.7, 1.1) + 128 + rng.uniform(-30, 30)


def place(sprite: Sprite, rng: np.random.Generator) -> tuple[Sprite, float]:
    """A sprite of the size of the image, recoloured, scaled, turned and moved, and its area without the border's cut.

    The colour of the result is multiplied by alpha, so that edges do not darken.
    """
    layer = np.concatenate([recolour(sprite.colour, rng) * sprite.alpha, sprite.alpha], axis=2)
    scale = math.exp(rng.uniform(*np.log(LENGTH))) / max(layer.shape[:2])
    # Area averages instead of aliases, where the sprite shrinks.
    layer = cv2.resize(layer, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    layer = layer[:, :: rng.choice([-1, 1])]
    height, width = layer.shape[:2]
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), rng.uniform(-40, 40), 1)
    matrix[:, 2] += rng.uniform(0.06, 0.94, 2) * SIZE - (width / 2, height / 2)
    placed = cv2.warpAffine(np.ascontiguousarray(layer), matrix, (SIZE, SIZE))
    return Sprite(sprite.label, placed[..., :3], placed[..., 3:]), float((layer[..., 3] > 0.5).sum())


def drop_hidden(layers: list[tuple[Sprite, float]]) -> list[tuple[Sprite, np.ndarray]]:
    """Of layers from back to front, those that are seen, each with its visible mask."""
    covered, seen = np.zeros((SIZE, SIZE), bool), []
    for sprite, area in reversed(layers):
        whole = sprite.alpha[..., 0] > 0.5
        mask = whole & ~covered
        if mask.sum() >= max(MIN_VISIBLE * area, MIN_PIXELS):
            seen.append((sprite, mask))
            covered |= whole
    return seen[::-1]


def compose(
    sprites: list[list[Sprite]], photographs: list[Path], rng: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """An image, and the label and mask of each of its objects."""
    image = draw_background(photographs, rng)
    chosen = [sprites[label] for label in rng.integers(len(sprites), size=rng.integers(*OBJECTS, endpoint=True))]
    seen = drop_hidden([place(drawings[rng.integers(len(drawings))], rng) for drawings in chosen])
    for sprite, _ in seen:
        image = image * (1 - sprite.alpha) + sprite.colour
    if rng.random() < 0.2:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.5, 1.5))
    if rng.random() < 0.25:
        image = image + rng.normal(0, rng.uniform(3, 12), image.shape)
    image = image * rng.uniform(0.85, 1.15) + rng.uniform(-10, 10)
    return np.clip(image, 0, 255).astype(np.uint8), [(sprite.label, mask) for sprite, mask in seen]


def write_crop(image: np.ndarray, box: np.ndarray, file: Path) -> None:
    """Writes the square around a box (x, y, w, h), with a border of a tenth; beyond the image it repeats the edge."""
    side = round(1.1 * max(box[2:]))
    crop = cv2.getRectSubPix(image, (side, side), (box[:2] + box[2:] / 2).tolist())
    crop = cv2.resize(crop, (CROP, CROP), interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(file), crop, [cv2.IMWRITE_JPEG_QUALITY, 95])


def write_split(
    out: Path, split: str, seeds: list[tuple[int, int, int]], classes: list[str], sprites: list, photographs: list[Path]
) -> None:
    """Writes the images, crops and annotations of a split, an image for each seed."""
    # A class without a crop has its folder too: a classifier numbers the folders.
    for folder in (out / 'images' / split, out / 'annotations', *(out / 'crops' / split / name for name in classes)):
        folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for index, seed in enumerate(seeds):
        image, objects = compose(sprites, photographs, np.random.default_rng(seed))
        name = f'{index:05d}.jpg'
        cv2.imwrite(str(out / 'images' / split / name), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        images.append(dict(id=index, file_name=name, width=SIZE, height=SIZE))
        for label, mask in objects:
            rle = coco_mask.encode(np.asfortranarray(mask, np.uint8))
            box, number = coco_mask.toBbox(rle), len(annotations) + 1
            write_crop(image, box, out / 'crops' / split / classes[label] / f'{number:06d}.jpg')
            segmentation = dict(size=rle['size'], counts=rle['counts'].decode())
            annotation = dict(id=number, image_id=index, category_id=label + 1, bbox=box.tolist(), iscrowd=0)
            annotations.append(dict(annotation, area=float(coco_mask.area(rle)), segmentation=segmentation))
    categories = [dict(id=label + 1, name=name) for label, name in enumerate(classes)]
    file = out / 'annotations' / f'instances_{split}.json'
    file.write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)))
    print(f'{split}: {len(images)} images, {len(annotations)} objects', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sprites', type=Path, required=True)
    parser.add_argument('--photographs', type=Path, required=True, help='JPEG files, also in folders of this folder')
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--train', type=int, default=4000, help='images (default %(default)s)')
    parser.add_argument('--val', type=int, default=300, help='images (default %(default)s)')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    classes, sprites = read_sprites(args.sprites)
    photographs = sorted(args.photographs.rglob('*.jpg'))
    if len(photographs) < 2:
        raise SystemExit(f'{args.photographs} has {len(photographs)} JPEG files: train and val need one each')
    behind = dict(val=photographs[::5], train=[path for index, path in enumerate(photographs) if index % 5])
    for number, (split, count) in enumerate(dict(val=args.val, train=args.train).items()):
        seeds = [(args.seed, number, index) for index in range(count)]
        write_split(args.out, split, seeds, classes, sprites, behind[split])


if __name__ == '__main__':
    main()
