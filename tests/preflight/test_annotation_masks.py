"""Masks that mmdet or pycocotools cannot read are refused before a run, with annotation and file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from coco_files import SIZE, SQUARE, dataset_cfg, make_content, run_cfg, write_split
from mmdet.registry import DATASETS
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from slab_det.common.errors import DataError
from slab_det.preflight import check_data

WIDTH, HEIGHT = SIZE
RUNS = dict(size=[HEIGHT, WIDTH], counts=[100, 20, HEIGHT * WIDTH - 120])
CODED = coco_mask.frPyObjects(RUNS, HEIGHT, WIDTH)
CODED['counts'] = CODED['counts'].decode()
TINY = [5, 5, 6, 6]
BAD = {
    'missing': (None, 'has no segmentation'),
    'empty': ([], 'has no segmentation'),
    'flat': (SQUARE[0], 'not a list of polygons'),
    'points': ([[[4, 4], [24, 4], [24, 24], [4, 24], [4, 9], [4, 6]]], 'polygons that are not lists of numbers'),
    'text': ([['4', '4', '24', '4', '24', '24']], 'polygons that are not lists of numbers'),
    'short': ([TINY], 'a polygon of 4 numbers: three points are six'),
    'no numbers': ([[]], 'a polygon of 0 numbers'),
    'size': (dict(RUNS, size=[WIDTH, HEIGHT]), r'RLE mask of size \[64, 48\], .* = \[48, 64\]'),
    'coded size': (dict(CODED, size=[24, 128]), r'RLE mask of size \[24, 128\]'),
    'sum': (dict(RUNS, counts=[100, 20]), 'RLE mask of 120 pixels, and its image has 3072'),
    'no counts': (dict(size=[HEIGHT, WIDTH]), 'RLE mask without "counts"'),
}
GOOD = {'polygon': SQUARE, 'parts': [*SQUARE, SQUARE[0]], 'RLE': RUNS, 'coded': CODED, 'tiny part': [SQUARE[0], TINY]}


def with_mask(segmentation: object, index: int = 13, **changes: object) -> dict:
    content = make_content()
    content['annotations'][index].update(segmentation=segmentation, **changes)
    if segmentation is None:
        del content['annotations'][index]['segmentation']
    return content


@pytest.mark.parametrize('split', ['train', 'val'])
@pytest.mark.parametrize(('segmentation', 'message'), BAD.values(), ids=BAD)
def test_a_mask_that_cannot_be_read_is_an_error_where_mmdet_fails(
    root: Path, split: str, segmentation, message: str, warnings: list[str]
) -> None:
    write_split(root, split, with_mask(segmentation))
    message = rf'{split}\.json: annotation 14 of image 6 .*{message}.*; 1 of its 20 ann'
    if split == 'train' and is_left_out(root):
        check_data(run_cfg(root, with_mask=True))
        assert re.search(message + '.* are ignored', warnings[0])
    else:
        with pytest.raises(DataError, match=message):
            check_data(run_cfg(root, with_mask=True))
    # Nobody reads it.
    check_data(run_cfg(root))
    write_split(root, split, with_mask(segmentation, category_id=3) | dict(categories=with_other()))
    check_data(run_cfg(root, with_mask=True))


def is_left_out(root: Path) -> bool:
    """Whether mmdet's own steps read image 6 of the training file without its second object."""
    try:
        objects = DATASETS.build(dataset_cfg(root, 'train', with_mask=True))[6]['data_samples'].gt_instances
    except Exception:
        return False
    return len(objects) == 1


def with_other() -> list[dict]:
    return [dict(id=i, name=name) for i, name in enumerate(('cat', 'dog', 'other'), start=1)]


@pytest.mark.parametrize('segmentation', GOOD.values(), ids=GOOD)
def test_masks_that_mmdet_and_pycocotools_read_are_taken(root: Path, segmentation) -> None:
    for split in ('train', 'val'):
        write_split(root, split, with_mask(segmentation))
        DATASETS.build(dataset_cfg(root, split, with_mask=True))[6]
    truth = COCO(root / 'annotations/val.json')
    assert truth.annToMask(truth.anns[14]).shape == (HEIGHT, WIDTH)
    check_data(run_cfg(root, with_mask=True))


def test_masks_that_only_the_evaluation_reads_are_checked(root: Path) -> None:
    # pycocotools takes the kind of all polygons from the first one.
    write_split(root, 'train', with_mask([TINY, SQUARE[0]]))
    check_data(run_cfg(root, with_mask=True))
    write_split(root, 'val', with_mask([TINY, SQUARE[0]]))
    with pytest.raises(DataError, match=r'val\.json: annotation 14 .*polygon of 4 numbers'):
        check_data(run_cfg(root, with_mask=True))
    # mmdet leaves such a box out, and pycocotools does not.
    for split, raises in (('train', False), ('val', True)):
        write_split(root, 'train'), write_split(root, 'val')
        write_split(root, split, with_mask(None, bbox=[4, 4, 0.5, 9]))
        cfg = run_cfg(root, with_mask=True)
        if raises:
            with pytest.raises(DataError, match='has no segmentation'):
                check_data(cfg)
        else:
            check_data(cfg)
    # Without mask steps in the pipeline: the metric alone asks.
    cfg.val_dataloader.dataset = cfg.test_dataloader.dataset = dataset_cfg(root, 'val')
    with pytest.raises(DataError, match=r'val\.json: annotation 14 .*no segmentation'):
        check_data(cfg)


@pytest.mark.parametrize('wrap', [lambda part: part, lambda part: dict(type='RepeatDataset', times=2, dataset=part)])
def test_rle_masks_are_told_where_mmdet_ignores_their_objects(root: Path, wrap: Callable, warnings: list[str]) -> None:
    content = with_mask(RUNS)
    for item in content['annotations'][:4]:
        item['segmentation'] = RUNS
    write_split(root, 'train', content)
    cfg = run_cfg(root, with_mask=True)
    cfg.train_dataloader.dataset.pipeline[1].poly2mask = False
    cfg.train_dataloader.dataset = wrap(cfg.train_dataloader.dataset)
    check_data(cfg)
    assert 'has an RLE mask, which LoadAnnotations(poly2mask=False)' in warnings[0] and '5 of its 20' in warnings[0]
    content['annotations'][4]['segmentation'] = RUNS
    write_split(root, 'train', content)
    with pytest.raises(DataError, match='annotation 1 .* has an RLE mask.*6 of its 20'):
        check_data(cfg)
    write_split(root, 'train', with_mask(RUNS, iscrowd=1))
    check_data(cfg)
    assert len(warnings) == 1


def scaled(content: dict, factor: float, count: int, coded: bool = False) -> dict:
    """The first ``count`` masks times ``factor``, boxes untouched, as polygons or RLE."""
    for item in content['annotations'][:count]:
        polygon = [[value * factor for value in SQUARE[0]]]
        item['segmentation'] = polygon
        if coded:
            item['segmentation'] = dict(coco_mask.frPyObjects(polygon, HEIGHT, WIDTH)[0])
            item['segmentation']['counts'] = item['segmentation']['counts'].decode()
    return content


@pytest.mark.parametrize('coded', [False, True], ids=['polygons', 'RLE'])
@pytest.mark.parametrize('split', ['train', 'val'])
def test_masks_that_do_not_lie_in_their_boxes_are_an_error_if_most_do(
    root: Path, split: str, coded: bool, warnings: list[str]
) -> None:
    write_split(root, split, scaled(make_content(), 1.1, 20, coded))
    check_data(run_cfg(root, with_mask=True))
    assert not warnings
    write_split(root, split, scaled(make_content(), 0.25, 20, coded))
    message = (
        rf'{split}\.json: 20 of 20 masks do not lie .* annotation 1 has bbox \[4, 4, 20, 20\].* in \[1.0, 1.0, 5.0,'
    )
    with pytest.raises(DataError, match=message):
        check_data(run_cfg(root, with_mask=True))
    # Without masks nobody reads them.
    check_data(run_cfg(root))
    write_split(root, split, scaled(make_content(), 0.25, 4, coded))
    check_data(run_cfg(root, with_mask=True))
    assert '4 of 20 masks do not lie in the boxes' in warnings[0]
