"""Writes the photographs of two public sets, kangaroos and raccoons, as one set in COCO format.

    git clone https://github.com/experiencor/kangaroo
    git clone https://github.com/datitran/raccoon_dataset
    python -m benchmarks.animals.prepare kangaroo/annots raccoon_dataset/annotations --out data/animals

Both hold Pascal VOC's XML files, and their photographs in `images` beside. Every fifth photograph is for validation.
A file that is damaged is left out. The repository of the kangaroos states no licence.
"""

import argparse
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import mmcv

CLASSES = ('kangaroo', 'raccoon')
CORNERS = ('xmin', 'ymin', 'xmax', 'ymax')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('annotations', nargs='+', type=Path, help='folders of XML files')
    parser.add_argument('--out', type=Path, required=True)
    args = parser.parse_args()
    files = [file for folder in args.annotations for file in sorted(folder.glob('*.xml'))]
    (args.out / 'annotations').mkdir(parents=True, exist_ok=True)
    for split, chosen in dict(train=[f for i, f in enumerate(files) if i % 5], val=files[::5]).items():
        (args.out / 'images' / split).mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for file in chosen:
            root = ElementTree.parse(file)
            name = root.findtext('filename')
            photograph = file.parents[1] / 'images' / name
            if mmcv.imread(str(photograph)) is None:
                print(f'{photograph}: left out, it cannot be read')
                continue
            shutil.copy(photograph, args.out / 'images' / split / name)
            size = {side: int(root.findtext(f'size/{side}')) for side in ('width', 'height')}
            images.append(dict(id=len(images) + 1, file_name=name, **size))
            for item in root.iter('object'):
                left, top, right, bottom = (float(item.findtext(f'bndbox/{corner}')) for corner in CORNERS)
                box = [left, top, right - left, bottom - top]
                annotations.append(
                    dict(
                        id=len(annotations) + 1, image_id=len(images), bbox=box, area=box[2] * box[3], iscrowd=0,
                        category_id=CLASSES.index(item.findtext('name')) + 1,
                    )
                )  # fmt: skip
        categories = [dict(id=i, name=name) for i, name in enumerate(CLASSES, 1)]
        values = dict(images=images, annotations=annotations, categories=categories)
        (args.out / f'annotations/instances_{split}.json').write_text(json.dumps(values))
        print(f'{split}: {len(images)} images, {len(annotations)} boxes')


if __name__ == '__main__':
    main()
