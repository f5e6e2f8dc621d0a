"""A config's data is checked before anything slow happens, with an error that says what to do."""

import shutil
from pathlib import Path

import pytest
from coco_files import dataset_cfg, make_annotation, make_content, run_cfg, write_split
from conftest import SMALL_SWIN
from mmdet.datasets import CocoDataset
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

from slab_det.common.errors import ConfigError, DataError
from slab_det.preflight import check_data, check_num_classes, set_data_root

CLASSES = {'classes': ('cat', 'dog')}
# A public name of the fixture's folder, which no config here names.
ELSEWHERE = Path('data/coco')


def train_on(root: Path, **changes: object) -> Config:
    cfg = run_cfg(root)
    cfg.train_dataloader.dataset.update(changes)
    return cfg


WRAPPERS = {
    'plain': lambda dataset: dataset,
    'concat': lambda dataset: {'type': 'ConcatDataset', 'datasets': [dataset]},
    'nested': lambda dataset: {
        'type': 'MultiImageMixDataset',
        'dataset': {'type': 'RepeatDataset', 'times': 2, 'dataset': dataset},
        'pipeline': [],
    },
}


@pytest.mark.parametrize('wrap', WRAPPERS.values(), ids=WRAPPERS)
def test_datasets_are_found_through_every_wrapper(root: Path, wrap) -> None:
    cfg = run_cfg(ELSEWHERE)
    cfg.data_root, cfg.train_dataloader.dataset = str(ELSEWHERE), wrap(cfg.train_dataloader.dataset)
    set_data_root(cfg, str(root))
    check_data(cfg)
    assert cfg.data_root == str(root)
    assert cfg.val_evaluator.ann_file == str(root / 'annotations' / 'val.json')
    cfg.train_dataloader.dataset = wrap(dataset_cfg(root, 'train', ann_file='annotations/nowhere.json'))
    with pytest.raises(DataError, match=r'train annotation file .*/nowhere\.json not found'):
        check_data(cfg)


@pytest.mark.parametrize(('what', 'argument'), [('annotation file', 'ann_file'), ('image folder', 'data_prefix')])
def test_missing_data_is_named_with_what_to_do(root: Path, what: str, argument: str) -> None:
    shutil.rmtree(root / ('annotations' if what == 'annotation file' else 'train'))
    with pytest.raises(DataError, match=rf'train {what} {root}/.* not found: correct {argument}.*--data-root'):
        check_data(run_cfg(root))
    if what == 'image folder':
        check_data(run_cfg(root), splits=('val',))


def test_an_evaluator_whose_annotations_are_missing_is_named(root: Path) -> None:
    cfg = run_cfg(root)
    cfg.val_evaluator = [cfg.val_evaluator, {'type': 'CocoMetric', 'ann_file': 'data/coco/nowhere.json'}]
    check_data(cfg, splits=('train',))
    with pytest.raises(DataError, match=r'val evaluator: .*/nowhere\.json not found.*--data-root'):
        check_data(cfg)


@pytest.mark.parametrize(
    ('classes', 'message'),
    [
        (('nucleus',), r'1 classes \(nucleus\).* 2 categories \(cat, dog\).*metainfo=dict\(classes='),
        # mmdet would call the dogs cats.
        (('dog', 'cat'), r'2 classes \(dog, cat\).*not in the same order'),
        ('cat', r'3 classes \(c, a, t\).* 2 categories'),
        (None, r'80 classes \(person, bicycle, car, motorcycle, airplane and 75 more\).* 2 categories'),
    ],
)
def test_class_names_that_do_not_match_are_an_error(root: Path, classes, message: str) -> None:
    with pytest.raises(DataError, match=f'train annotation file .*{message}'):
        check_data(train_on(root, metainfo=classes and {'classes': classes}))


def test_classes_may_be_some_of_the_categories(root: Path) -> None:
    categories = [dict(id=i, name=name) for i, name in enumerate(('cat', 'dog', 'cow'), start=1)]
    write_split(root, 'train', make_content(categories=categories[::2] + categories[1:2]))
    check_data(run_cfg(root))


@pytest.mark.parametrize(
    ('head', 'detector'),
    [('roi_head.bbox_head.0', 'cascade-mask-rcnn_r50_fpn'), ('bbox_head', 'retinanet_r50_fpn')],
)
def test_heads_with_another_number_of_classes_are_an_error(head: str, detector: str) -> None:
    cfg = Config.fromstring(f"_base_ = ['mmdet::_base_/models/{detector}.py']", '.py').model
    model, coco = MODELS.build({**cfg, 'backbone': SMALL_SWIN}), CocoDataset(lazy_init=True)
    check_num_classes(model, coco, 'train')
    blobs = CocoDataset(lazy_init=True, metainfo=CLASSES)
    with pytest.raises(DataError, match=rf'^{head} has num_classes=80, but the val dataset has 2'):
        check_num_classes(nn.DataParallel(model), blobs, 'val')
    # In Grounding DINO num_classes is the length of the text.
    model.language_model = nn.Identity()
    check_num_classes(model, blobs, 'val')


def test_boxes_given_as_corners_are_an_error(root: Path) -> None:
    def write(*boxes: list[float]) -> None:
        annotations = [make_annotation(i, image_id=0, bbox=box) for i, box in enumerate(boxes)]
        write_split(root, 'train', make_content(annotations=annotations))

    corners = [[6, 6, 12, 12], [30, 6, 48, 18], [0, 24, 24, 48], [12, 12, 24, 24]]
    write(*corners)
    with pytest.raises(DataError, match='2 of its 4 boxes .*30, 6, 48, 18.*not corners'):
        check_data(run_cfg(root))
    # The border cuts off a few boxes of real data.
    write([30, 30, 20.4, 20.4], *corners[:2], corners[3])
    check_data(run_cfg(root))


def test_panoptic_annotations_are_not_checked(root: Path) -> None:
    annotations = [{'image_id': 0, 'file_name': '0.png', 'segments_info': []}]
    write_split(root, 'train', make_content(annotations=annotations))
    check_data(train_on(root, type='CocoPanopticDataset'))


@pytest.mark.parametrize('text', ['{"images": [', '[]', '{"images": []}'])
def test_file_that_is_not_coco_json_is_an_error(root: Path, text: str) -> None:
    (root / 'annotations' / 'train.json').write_text(text)
    with pytest.raises(DataError, match=r'train\.json is not COCO JSON'):
        check_data(run_cfg(root))


def test_remote_and_generated_data_are_not_checked() -> None:
    cfg = run_cfg('s3://bucket/coco')
    check_data(cfg)
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset = {'type': 'SyntheticShapes', 'split': 'val'}
    check_data(cfg)


def test_a_dataset_without_a_folder_of_images_is_an_error(root: Path) -> None:
    cfg = run_cfg(root)
    cfg.val_dataloader.dataset.pop('data_prefix')
    with pytest.raises(DataError, match=r"^val dataset: .* '' for the root"):
        check_data(cfg)


def test_a_data_prefix_that_is_text_is_an_error(root: Path) -> None:
    cfg = run_cfg(root)
    cfg.val_dataloader.dataset.data_prefix = 'val/'
    with pytest.raises(ConfigError, match=r"^val_dataloader: .* write data_prefix=dict\(img='val/'\)"):
        check_data(cfg)


def test_images_and_annotations_in_a_store_are_not_checked(root: Path) -> None:
    """Paths of LMDB, zip archives and Petrel look like local ones."""
    cfg = run_cfg(root)
    shutil.rmtree(root / 'train')
    dataset = cfg.train_dataloader.dataset
    dataset.pipeline = [dict(type='LoadImageFromFile', backend_args=dict(backend='local'))]
    with pytest.raises(DataError, match='train image folder .* not found'):
        check_data(cfg)
    dataset.pipeline[0].backend_args = dict(backend='lmdb', db_path='images.lmdb')
    check_data(cfg)
    dataset.metainfo = dict(classes=('cow',))
    with pytest.raises(DataError, match=r'\(cow\) are not among its 2 categories'):
        check_data(cfg, ('train',))
    (root / 'annotations/train.json').unlink()
    dataset.backend_args = dict(backend='petrel', path_mapping={'data/': 's3://data/'})
    check_data(cfg, ('train',))
    cfg.val_evaluator.update(ann_file='data/val.json', backend_args=dataset.backend_args)
    dataset.metainfo = dict(classes=('cat', 'dog'))
    check_data(cfg)


def test_data_root_finds_image_folders_below_images(root: Path, tmp_path: Path) -> None:
    (root / 'images').mkdir()
    (root / 'train').rename(root / 'images' / 'train')
    cfg = run_cfg(ELSEWHERE)
    set_data_root(cfg, str(root))
    check_data(cfg)
    assert cfg.train_dataloader.dataset.data_prefix.img == 'images/train/'
    with pytest.raises(DataError, match='--data-root .*nowhere is not a folder'):
        set_data_root(cfg, str(tmp_path / 'nowhere'))
