"""Annotations that mmdet would drop, mix up or fail on are told before a run, by number and reason."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from coco_files import (
    dataset_cfg,
    make_annotation,
    make_content,
    read_objects_from_samples,
    run_cfg,
    write_images,
    write_split,
)
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from mmengine.logging import MMLogger
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from slab_det.common.errors import DataError
from slab_det.preflight import check_data
from slab_det.preflight.annotations import count_objects, read_coco


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = []
    monkeypatch.setattr(MMLogger.get_current_instance(), 'info', found.append)
    return found


def change_all(content: dict, **changes: object) -> dict:
    return content | dict(annotations=[item | changes for item in content['annotations']])


LOST = {
    'crowd': (dict(iscrowd=1), r'20 are marked "iscrowd".*has iscrowd = 1'),
    # A string is true.
    'crowd as text': (dict(iscrowd='0'), r'20 are marked "iscrowd".*has iscrowd = \'0\''),
    'ignore': (dict(ignore=True), r'20 are marked "ignore"'),
    'area': (dict(area=0), r'20 have an area of 0 or less'),
    'from 0 to 1': (dict(bbox=[0.1, 0.1, 0.4, 0.4], area=0.16), r'20 are under one pixel.*in pixels, not from 0 to 1'),
    'NaN': (dict(bbox=[math.nan] * 4), r'20 do not overlap their image'),
    'outside': (dict(bbox=[-30, 0, 20, 20]), r'20 do not overlap their image'),
    'category': (dict(category_id=7), r'20 name no category.*category_id = 7'),
    'category as text': (dict(category_id='1'), r"20 name no category.*category_id = '1'"),
    'image as text': (dict(image_id='1'), r"20 name no image.*image_id = '1'"),
    'image': (dict(image_id=99), r'20 name no image.*image_id = 99'),
}


@pytest.mark.parametrize('split', ['train', 'val'])
@pytest.mark.parametrize(('changes', 'message'), LOST.values(), ids=LOST)
def test_a_split_without_an_object_is_an_error(root: Path, split: str, changes: dict, message: str) -> None:
    write_split(root, split, change_all(make_content(), **changes))
    with pytest.raises(DataError, match=rf'{split} annotation file .*{split}\.json: 20 of its 20 annot.*{message}'):
        check_data(run_cfg(root))


def test_more_than_a_quarter_of_lost_objects_is_an_error_and_fewer_a_line(root: Path, lines: list[str]) -> None:
    content = make_content()
    for item in content['annotations'][:5]:
        item['area'] = 0
    content['annotations'][0]['iscrowd'] = 1
    content['annotations'][7]['iscrowd'] = 1
    write_split(root, 'train', content)
    check_data(run_cfg(root))
    (line,) = lines
    assert 'train.json: 6 of its 20 annotations' in line and '1 are marked "iscrowd"' in line
    assert '5 have an area of 0 or less (annotation 1 has area = 0)' in line
    content['annotations'][5]['area'] = 0
    write_split(root, 'train', content)
    with pytest.raises(DataError, match='7 of its 20 annotations'):
        check_data(run_cfg(root))


@pytest.mark.parametrize('mark', ['iscrowd', 'ignore'])
def test_more_than_a_quarter_of_marked_objects_is_a_warning(root: Path, warnings: list[str], mark: str) -> None:
    """Half of the boxes of CityPersons are regions to ignore, and without them its detectors would be worse."""
    content = make_content()
    for item in content['annotations'][1:]:
        item[mark] = 1
    write_split(root, 'train', content)
    check_data(run_cfg(root))
    assert f'19 of its 20 annotations are no objects to learn or to find: 19 are marked "{mark}"' in warnings[0]


def test_lost_objects_are_those_that_mmdet_drops_or_ignores(tmp_path: Path) -> None:
    rng, numbers = random.Random(0), (math.nan, -70, -3, 0, 0.5, 1, 7, 60, 64, 70, 1e9)
    for seed in range(40):
        draw = rng.choice
        content = make_content()
        content['annotations'] = [
            make_annotation(
                index,
                bbox=[draw(numbers) for _ in range(4)] if rng.random() < 0.7 else [3, 3, 9, 9],
                area=draw((-1, 0, 0.5, 9, 9, math.nan)),
                category_id=draw((0, 1, 1, 2, 2, 5)),
                iscrowd=draw((0, 0, 0, 1, True, '', '0')),
                ignore=draw((0, False, None, 0, 0, 1)),
                image_id=draw(range(11)),
            )
            for index in range(60)
        ]
        # An annotation that is right, so that not all are lost.
        content['annotations'] += [make_annotation(index + 60, image_id=3) for index in range(400)]
        path = tmp_path / f'{seed}.json'
        path.write_text(json.dumps(content))
        dataset = CocoDataset(ann_file=str(path), metainfo=dict(classes=('cat',)), data_prefix=dict(img=''))
        kept = [instance for data in dataset for instance in data['instances'] if not instance['ignore_flag']]
        assert count_objects(read_coco(str(path), 'file'), ('cat',)) == len(kept), path.read_text()


def test_ids_that_are_off_by_one_are_an_error(root: Path) -> None:
    # 19 of 20 boxes would lie on the image before theirs.
    for key, step in itertools.product(('image_id', 'category_id'), (-1, 1)):
        content = make_content()
        for item in content['annotations']:
            item[key] += step
        write_split(root, 'train', content)
        with pytest.raises(DataError, match=rf'every {key} .* is one {"below" if step < 0 else "above"} an id'):
            check_data(run_cfg(root))


def test_annotations_of_a_list_of_images_that_was_cut_short_are_no_fault(root: Path, lines: list[str]) -> None:
    content = make_content()
    write_split(root, 'train', content | dict(images=content['images'][:2]))
    check_data(run_cfg(root))
    assert '16 name no image of "images"' in lines[0]
    # These belong to images that have no annotation, and would be trained as background.
    content['annotations'] = [
        item | dict(image_id=item['image_id'] + 50 * (i > 7)) for i, item in enumerate(content['annotations'])
    ]
    write_split(root, 'train', content)
    with pytest.raises(DataError, match='12 name no image'):
        check_data(run_cfg(root))


def test_a_training_split_without_an_object_is_an_error_unless_another_file_has_some(root: Path) -> None:
    write_split(root, 'empty', make_content(annotations=[]))
    empty, full = dataset_cfg(root, 'empty', test_mode=False), dataset_cfg(root, 'train')
    cfg = run_cfg(root)
    cfg.train_dataloader.dataset = Config(empty)
    with pytest.raises(DataError, match=r'empty\.json: there is no object'):
        check_data(cfg)
    # Background alone, beside a labelled set.
    cfg.train_dataloader.dataset = Config(dict(type='ConcatDataset', datasets=[empty, full]))
    check_data(cfg)
    # Test sets are published without annotations.
    cfg.test_dataloader.dataset.ann_file = cfg.test_evaluator.ann_file = f'{root}/annotations/empty.json'
    cfg.test_dataloader.dataset.data_prefix.img = 'empty/'
    check_data(cfg)


def empty_pictures(root: Path) -> Config:
    write_split(root, 'train', make_content(annotations=[make_annotation(0)]))
    write_split(root, 'empty', make_content(annotations=[]))
    cfg = run_cfg(root)
    cfg.train_dataloader.dataset.filter_cfg = dict(filter_empty_gt=True, min_size=32)
    # One picture stays.
    check_data(cfg)
    cfg.train_dataloader.dataset.update(ann_file='annotations/empty.json')
    return cfg


def small_pictures(root: Path) -> Config:
    cfg = run_cfg(root)
    cfg.train_dataloader.dataset.filter_cfg = dict(min_size=49)
    return cfg


def no_pictures(root: Path) -> Config:
    write_split(root, 'train', make_content(images=[], annotations=[]))
    return run_cfg(root)


@pytest.mark.parametrize(
    ('break_it', 'message'),
    [
        (empty_pictures, r'empty\.json: filter_cfg leaves none of its 10 images: 10 have no annotation .*, and 0 are'),
        (small_pictures, r'none of its 10 images: 0 have no annotation .*, and 10 are smaller than min_size=49'),
        (no_pictures, r'train\.json names no image'),
    ],
)
def test_a_training_split_without_an_image_is_an_error(root: Path, break_it: Callable, message: str) -> None:
    cfg = break_it(root)
    # What mmdet says.
    with pytest.raises(ValueError, match='need at least one array to concatenate'):
        CocoDataset(**{key: value for key, value in cfg.train_dataloader.dataset.items() if key != 'type'})
    with pytest.raises(DataError, match=message):
        check_data(cfg)


@pytest.mark.parametrize(('part', 'index', 'taken'), [('images', 4, 3), ('categories', 1, 1), ('annotations', 5, 1)])
def test_two_parts_of_one_id_are_an_error(root: Path, part: str, index: int, taken: int) -> None:
    content = make_content()
    content[part][index]['id'] = taken
    write_split(root, 'val', content)
    with pytest.raises(DataError, match=rf'val\.json: 1 ids .* its {part} \({taken}\)'):
        check_data(run_cfg(root))


def test_names_of_categories_that_are_numbers_are_an_error(root: Path) -> None:
    categories = [dict(id=1, name=1), dict(id=2, name=2)]
    for names in ((1, 2), ('1', '2'), ('cat', 'dog')):
        write_split(root, 'train', make_content(categories=categories))
        cfg = run_cfg(root)
        cfg.train_dataloader.dataset.metainfo.classes = cfg.val_dataloader.dataset.metainfo.classes = names
        with pytest.raises(DataError, match='1, 2.* write "1" in quotes'):
            check_data(cfg, ('train',))


@pytest.mark.parametrize(
    ('ids', 'message'), [(0, 'the id 0, .*count as missed'), ('a', "the id 'a0', .*numbers alone")]
)
def test_annotation_ids_are_numbers_from_1_where_pycocotools_reads_them(root: Path, ids, message: str) -> None:
    """With an id of 0, a perfect detector of this file would get less than 1."""
    content = make_content()
    for index, item in enumerate(content['annotations']):
        item['id'] = ids + index if ids == 0 else f'{ids}{index}'
    write_split(root, 'train', content)
    check_data(run_cfg(root))
    write_split(root, 'val', content)
    with pytest.raises(DataError, match=rf'val\.json: an annotation has {message}.*number them from 1'):
        check_data(run_cfg(root))
    if ids == 0:
        assert perfect_ap(root / 'annotations/val.json') < 1
        write_split(root, 'val')
        assert perfect_ap(root / 'annotations/val.json') == pytest.approx(1)


def perfect_ap(path: Path) -> float:
    """What pycocotools says of detections that are the objects of a file."""
    truth = COCO(path)
    found = truth.loadRes([item | dict(score=0.9) for item in json.loads(path.read_text())['annotations']])
    evaluation = COCOeval(truth, found, 'bbox')
    evaluation.evaluate(), evaluation.accumulate(), evaluation.summarize()
    return evaluation.stats[0]


def test_iscrowd_is_needed_where_pycocotools_reads_it(root: Path) -> None:
    content = make_content()
    for item in content['annotations']:
        del item['iscrowd']
    write_split(root, 'train', content)
    check_data(run_cfg(root))
    write_split(root, 'val', content)
    with pytest.raises(DataError, match=r'val\.json: .*image 0 has no iscrowd'):
        check_data(run_cfg(root))
    write_split(root, 'val', change_all(content, iscrowd=None))
    with pytest.raises(DataError, match='has no iscrowd'):
        check_data(run_cfg(root))
    # By the instances in the samples.
    cfg = run_cfg(root)
    read_objects_from_samples(cfg)
    check_data(cfg)


@pytest.mark.parametrize('changes', [dict(category_id=[1]), dict(image_id=[0]), dict(area='400'), dict(bbox='box')])
def test_values_of_other_types_are_no_coco_json(root: Path, changes: dict) -> None:
    write_split(root, 'train', change_all(make_content(), **changes))
    with pytest.raises(DataError, match=r'train\.json is not COCO JSON: (Type|Value)Error'):
        check_data(run_cfg(root))


def test_ids_may_be_sparse_or_text_and_a_category_without_objects_may_come_first(root: Path) -> None:
    content = make_content(categories=[dict(id='z', name='all'), dict(id='a', name='cat'), dict(id=-5.5, name='dog')])
    for image in content['images']:
        image['id'] = f'picture {image["id"] * 1000}'
    for item in content['annotations']:
        item.update(image_id=f'picture {item["image_id"] * 1000}', category_id={1: 'a', 2: -5.5}[item['category_id']])
    write_split(root, 'train', content)
    check_data(run_cfg(root), ('train',))
    dataset = run_cfg(root).train_dataloader.dataset
    assert len(CocoDataset(**{key: value for key, value in dataset.items() if key != 'type'})) == 10


def test_a_missing_image_is_found_behind_links_and_in_subfolders(root: Path) -> None:
    content = make_content()
    for image in content['images']:
        image['file_name'] = f'sub/{image["file_name"]}'
    write_images(root / 'train' / 'sub')
    write_split(root, 'train', content)
    check_data(run_cfg(root))
    (root / 'train/sub/3.jpg').rename(root / 'train/sub/moved.jpg')
    (root / 'train/sub/3.jpg').symlink_to('moved.jpg')
    check_data(run_cfg(root))
    (root / 'train/sub/moved.jpg').unlink()
    with pytest.raises(DataError, match=r'train image .*sub/3\.jpg not found'):
        check_data(run_cfg(root))
