"""An evaluator compares with the images and classes of its dataset."""

from __future__ import annotations

from pathlib import Path

import pytest
from coco_files import dataset_cfg, make_annotation, make_content, read_objects_from_samples, run_cfg, write_split
from mmdet.evaluation import CocoMetric
from mmdet.registry import DATASETS
from mmengine.config import Config

from slab_det.common.errors import ConfigError, DataError
from slab_det.preflight import check_data


def fewer(start: int, end: int) -> dict:
    content = make_content()
    annotations = [item for item in content['annotations'] if start <= item['image_id'] < end]
    return content | dict(images=content['images'][start:end], annotations=annotations)


def evaluate_on(root: Path, name: str, **changes: object) -> Config:
    cfg = run_cfg(root)
    cfg.val_evaluator.update(ann_file=f'{root}/annotations/{name}.json', **changes)
    return cfg


def other_names(content: dict) -> dict:
    """Another split, whose ids begin at 0 as well."""
    for image in content['images']:
        image['file_name'] = f'other/{image["id"]}.png'
    return content


OTHERS = {
    'more images': (make_content(12), '2 of its 12 images are not in the val dataset'),
    'fewer images': (fewer(0, 4), '0 of its 4 images are not in .* 6 images of the dataset are not in the file'),
    'other images of these ids': (other_names(make_content()), '10 of its 10 images are not in the val dataset'),
    'order': (make_content(categories=[dict(id=2, name='dog'), dict(id=1, name='cat')]), 'not in the same order'),
    'category_id': (make_content(annotations=[make_annotation(0, category_id=9)]), '1 name no category'),
}


@pytest.mark.parametrize(('content', 'message'), OTHERS.values(), ids=OTHERS)
def test_an_evaluator_of_another_file_is_an_error(root: Path, content: dict, message: str) -> None:
    write_split(root, 'other', content)
    cfg = evaluate_on(root, 'other')
    check_data(cfg, ('train',))
    with pytest.raises(DataError, match=rf'val evaluator: .*other\.json.*{message}'):
        check_data(cfg)
    # Also in a list, and inside mmengine's own evaluator.
    cfg.val_evaluator = [dict(type='DumpDetResults', out_file_path='out.pkl'), cfg.val_evaluator]
    with pytest.raises(DataError, match=message):
        check_data(cfg)
    cfg.val_evaluator = dict(type='Evaluator', metrics=cfg.val_evaluator)
    with pytest.raises(DataError, match=message):
        check_data(cfg)


def test_masks_of_another_file_are_checked(root: Path) -> None:
    content = make_content()
    del content['annotations'][3]['segmentation']
    write_split(root, 'other', content)
    check_data(evaluate_on(root, 'other'))
    with pytest.raises(DataError, match=r'other\.json: annotation 4 .*no segmentation'):
        check_data(evaluate_on(root, 'other', metric=['bbox', 'segm']))


def test_a_copy_of_the_file_and_a_link_to_it_are_as_good(root: Path) -> None:
    content = make_content()
    for image in content['images']:
        image['file_name'] = f'some/where/{image["file_name"]}'
    write_split(root, 'copy', content)
    check_data(evaluate_on(root, 'copy'))
    (root / 'annotations/link.json').symlink_to('val.json')
    check_data(evaluate_on(root, 'link'))


def test_objects_that_only_pycocotools_counts_and_files_without_any_are_told(root: Path, warnings: list[str]) -> None:
    content = make_content()
    content['annotations'][3]['ignore'] = 1
    content['annotations'][4].update(ignore=1, iscrowd=1)
    write_split(root, 'val', content)
    check_data(run_cfg(root), ('val',))
    assert 'val.json: 1 objects are marked "ignore", which pycocotools does not know' in warnings.pop()
    write_split(root, 'val', make_content(annotations=[]))
    cfg = run_cfg(root)
    check_data(cfg, ('val',))
    assert 'val.json: it has no object of the classes (cat, dog), so AP will be -1' in warnings.pop()
    # The file of a test set whose annotations nobody has.
    cfg.val_evaluator.update(format_only=True, outfile_prefix='results')
    check_data(cfg, ('val',))
    assert not warnings


def test_an_evaluation_of_some_images_is_an_error(root: Path) -> None:
    for indices, missed in ((4, 6), (-4, 6), ([0, 5], 8)):
        cfg = run_cfg(root)
        cfg.val_dataloader.dataset.indices = indices
        with pytest.raises(DataError, match=rf'{missed} of its 10 images are not in .* no indices'):
            check_data(cfg)
    # By the instances in the samples.
    read_objects_from_samples(cfg)
    check_data(cfg)


def test_several_files_are_evaluated_by_one_or_each_by_its_own(root: Path) -> None:
    for name, ends in (('first', (0, 4)), ('second', (4, 10))):
        write_split(root, name, fewer(*ends))
    parts = [dataset_cfg(root, name) for name in ('first', 'second')]
    cfg = run_cfg(root)
    cfg.val_dataloader.dataset = Config(dict(type='ConcatDataset', datasets=parts))
    check_data(cfg)
    metrics = [dict(type='CocoMetric', ann_file=f'{root}/annotations/{name}.json') for name in ('first', 'second')]
    cfg.val_evaluator = dict(type='MultiDatasetsEvaluator', metrics=metrics, dataset_prefixes=['a', 'b'])
    check_data(cfg)
    cfg.val_evaluator.metrics = metrics[::-1]
    with pytest.raises(DataError, match=r'second\.json: 6 of its 6 images are not in'):
        check_data(cfg)
    # One id for an image of each file.
    cfg = run_cfg(root)
    cfg.val_dataloader.dataset = Config(dict(type='ConcatDataset', datasets=[dataset_cfg(root, 'val'), parts[0]]))
    with pytest.raises(DataError, match='4 ids occur twice'):
        check_data(cfg)


def test_an_evaluator_without_a_file_needs_the_objects_in_the_samples(root: Path) -> None:
    """mmdet finds out after the first epoch."""
    for name, ends in (('first', (0, 4)), ('second', (4, 10))):
        write_split(root, name, fewer(*ends))
    cfg = run_cfg(root)
    cfg.val_dataloader.dataset = Config(
        dict(type='ConcatDataset', datasets=[dataset_cfg(root, name) for name in ('first', 'second')])
    )
    cfg.val_evaluator.ann_file = None
    with pytest.raises(ConfigError, match=r"^val_evaluator: .*without ann_file.*'instances' to its meta_keys"):
        check_data(cfg)
    for dataset in cfg.val_dataloader.dataset.datasets:
        dataset.pipeline[-1].meta_keys = ('img_id', 'ori_shape', 'instances')
    check_data(cfg)
    # mmdet takes what passed the check.
    samples = [data['data_samples'] for data in DATASETS.build(cfg.val_dataloader.dataset)]
    metric = CocoMetric(metric='bbox')
    metric.dataset_meta = cfg.val_dataloader.dataset.datasets[0].metainfo
    for sample in samples:
        objects = sample.gt_instances
        found = dict(bboxes=objects.bboxes.tensor, scores=objects.labels * 0 + 0.9, labels=objects.labels)
        metric.process({}, [dict(sample.metainfo, pred_instances=found)])
    assert metric.evaluate(len(samples))['coco/bbox_mAP'] == 1
