"""Small COCO data sets, right in everything that a test does not change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from mmengine.config import Config
from PIL import Image

NAMES = ('cat', 'dog')
SIZE = (64, 48)
SQUARE = [[4, 4, 24, 4, 24, 24, 4, 24]]


def make_annotation(index: int, **changes: object) -> dict:
    """Annotation number ``index``, on image ``index // 2``, of each category in turn."""
    box = dict(bbox=[4, 4, 20, 20], area=400, iscrowd=0, segmentation=SQUARE)
    return dict(id=index + 1, image_id=index // 2, category_id=1 + index % 2) | box | changes


def make_content(num_images: int = 10, **changes: object) -> dict:
    """What a COCO file holds: images of two annotations each, and two categories."""
    images = [dict(id=i, file_name=f'{i}.jpg', width=SIZE[0], height=SIZE[1]) for i in range(num_images)]
    categories = [dict(id=i, name=name) for i, name in enumerate(NAMES, start=1)]
    annotations = [make_annotation(i) for i in range(2 * num_images)]
    return dict(images=images, annotations=annotations, categories=categories) | changes


def write_images(folder: Path, num_images: int = 10, size: tuple[int, int] = SIZE, orientation: int = 1) -> None:
    """Writes JPEGs of one size, with an EXIF orientation unless it is 1."""
    folder.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for index in range(num_images):
        pixels = np.random.default_rng(index).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f'{index}.jpg', **({'exif': exif} if orientation != 1 else {}))


def write_split(root: Path, split: str, content: dict | None = None) -> None:
    """Writes ``annotations/<split>.json``, and its images unless they are there."""
    (root / 'annotations').mkdir(parents=True, exist_ok=True)
    (root / 'annotations' / f'{split}.json').write_text(json.dumps(content or make_content()))
    if not (root / split).exists():
        write_images(root / split)


def dataset_cfg(root: Path, split: str, with_mask: bool = False, **changes: object) -> dict:
    """The config of a split, with the steps of mmdet's pipelines that read files."""
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=with_mask),
        dict(type='PackDetInputs'),
    ]
    files = dict(ann_file=f'annotations/{split}.json', data_prefix=dict(img=f'{split}/'))
    common = dict(type='CocoDataset', data_root=str(root), metainfo=dict(classes=NAMES), pipeline=pipeline)
    return common | files | dict(test_mode=split != 'train') | changes


def run_cfg(root: Path, with_mask: bool = False) -> Config:
    """A config with all splits, whose test set is the validation set."""
    metric = ['bbox', 'segm'] if with_mask else 'bbox'
    cfg = dict(train_dataloader=dict(dataset=dataset_cfg(root, 'train', with_mask)))
    for split in ('val', 'test'):
        cfg[f'{split}_dataloader'] = dict(dataset=dataset_cfg(root, 'val', with_mask))
        cfg[f'{split}_evaluator'] = dict(type='CocoMetric', ann_file=f'{root}/annotations/val.json', metric=metric)
    return Config(cfg)


def read_objects_from_samples(cfg: Config) -> None:
    """Takes ``ann_file`` from the evaluators of :func:`run_cfg`, in place, and gives samples what they read instead."""
    for split in ('val', 'test'):
        cfg[f'{split}_evaluator'].pop('ann_file')
        cfg[f'{split}_dataloader'].dataset.pipeline[-1].meta_keys = ('img_id', 'ori_shape', 'instances')
