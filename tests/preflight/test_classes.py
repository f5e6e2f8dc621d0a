"""Label i is one name in the training, the checkpoint, the files and the test: another order is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coco_files import dataset_cfg, make_content, run_cfg, write_split
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from slab_det.common.errors import DataError
from slab_det.data import SyntheticShapes
from slab_det.preflight import check_class_order, check_data, check_num_classes

CLASSES = SyntheticShapes.METAINFO['classes']
SWAPPED = [dict(id=2, name='dog'), dict(id=1, name='cat')]


def test_a_validation_file_in_another_order_is_to_be_reordered(root: Path) -> None:
    write_split(root, 'val', make_content(categories=SWAPPED))
    cfg = run_cfg(root)
    message = r'val\.json: .*\(cat, dog\) .*\(dog, cat\): put its "categories" in the order'
    with pytest.raises(DataError, match=message) as caught:
        check_data(cfg)
    assert 'metainfo' not in str(caught.value)
    # Trained as cat and dog, tested as dog and cat: an AP near 0 without an error.
    for loader in (cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.metainfo.classes = ('dog', 'cat')
    for split in ('val', 'test'):
        with pytest.raises(
            DataError,
            match=rf"^{split} dataset: .* 'cat' there and 'dog' here.*categories. of .*val\.json",
        ):
            check_data(cfg, (split,))
    # The remedy.
    write_split(root, 'val', make_content(categories=SWAPPED[::-1]))
    check_data(run_cfg(root))


def test_a_training_file_in_another_order_may_name_it_in_every_split(root: Path) -> None:
    for split in ('train', 'val'):
        write_split(root, split, make_content(categories=SWAPPED))
    cfg = run_cfg(root)
    with pytest.raises(DataError, match=r"set metainfo=dict\(classes=\('dog', 'cat'\)\) .* all splits"):
        check_data(cfg)
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.metainfo.classes = ('dog', 'cat')
    check_data(cfg)


def test_a_test_file_that_lacks_a_category_is_told_to_have_all(root: Path) -> None:
    content = make_content(categories=SWAPPED[1:])
    content['annotations'] = [item for item in content['annotations'] if item['category_id'] == 1]
    write_split(root, 'val', content)
    with pytest.raises(DataError, match=r'1 categories \(cat\).* give the file a category'):
        check_data(run_cfg(root))
    cfg = run_cfg(root)
    cfg.test_dataloader.dataset.metainfo.classes = ('cat',)
    with pytest.raises(DataError, match=r'1 classes \(cat\) are not the 2'):
        check_data(cfg, ('test',))
    # As the message says.
    write_split(root, 'val', content | dict(categories=SWAPPED[::-1]))
    check_data(run_cfg(root))


def test_files_of_one_training_have_the_same_classes(root: Path) -> None:
    write_split(root, 'other', make_content(categories=SWAPPED))
    other = dataset_cfg(root, 'other', metainfo=dict(classes=('dog', 'cat')), test_mode=False)
    cfg = run_cfg(root)
    both = Config(dict(type='ConcatDataset', datasets=[dataset_cfg(root, 'train'), other]))
    cfg.train_dataloader.dataset = dict(type='RepeatDataset', times=2, dataset=both)
    with pytest.raises(DataError, match=r'^train dataset: .*\(dog, cat\)'):
        check_data(cfg)
    # A folder of pictures, beside a teacher.
    cfg.train_dataloader.dataset = dict(type='ImageFolder', folder='pictures', metainfo=dict(classes=('dog', 'cat')))
    with pytest.raises(DataError, match=r'^val dataset: .*\(cat, dog\) .* \(dog, cat\)'):
        check_data(cfg)
    # Grounding DINO and GLIP find what a text names, in each dataset another one.
    cfg.train_dataloader.dataset = both
    cfg.model = dict(type='GLIP', language_model=dict(type='BertModel'))
    check_data(cfg)
    both.datasets[1].metainfo = dict(classes=('cat', 'dog'))
    write_split(root, 'other', make_content(categories=SWAPPED[:1], annotations=[]))
    with pytest.raises(DataError, match=r'1 categories \(dog\).* give a file that is one of several'):
        check_data(cfg)


@pytest.mark.parametrize('split', ['train', 'val'])
def test_categories_of_one_name_are_named(root: Path, split: str) -> None:
    """Roboflow's exports begin with a category of the project's name; mmdet would train all objects as background."""
    content = make_content(categories=[dict(id=0, name='cat', supercategory='none'), dict(id=1, name='cat')])
    content['annotations'] = [item | dict(category_id=1) for item in content['annotations']]
    cfg = run_cfg(root)
    for name in ('train', 'val'):
        write_split(root, name, content if name == split else content | dict(categories=content['categories'][1:]))
        cfg[f'{name}_dataloader'].dataset.metainfo = dict(classes=('cat',))
    with pytest.raises(DataError, match=rf'{split}\.json: .* cat \(id 0\), cat \(id 1\) .*Roboflow'):
        check_data(cfg, ('train', 'val'))


def test_classes_that_nothing_tells_are_not_compared(root: Path) -> None:
    cfg = run_cfg(root)
    for expected in ((), ['cat', 'dog']):
        check_class_order(cfg, 'test', expected, 'model.onnx')
    with pytest.raises(DataError, match=r'not the 80 of model\.onnx'):
        check_class_order(cfg, 'test', CLASSES * 20, 'model.onnx')
    cfg.train_dataloader = None
    cfg.test_dataloader.dataset.metainfo.classes = ('dog', 'cat')
    check_class_order(cfg, 'test')


def save(cfg: Config, path: Path, meta: dict) -> None:
    runner = Runner.from_cfg(cfg.copy())
    torch.save(dict(state_dict=runner.model.state_dict(), meta=meta), path)


@pytest.mark.parametrize('has_hook', [True, False])
def test_a_test_compares_the_classes_of_the_checkpoint(
    tmp_path: Path, call: Callable, small_run_cfg: Callable[..., Config], has_hook: bool
) -> None:
    cfg = small_run_cfg(depths=(1, 1, 1, 1))
    if not has_hook:
        del cfg.default_hooks.checked_load
    cfg.dump(tmp_path / 'small.py')
    metas = dict(
        same=dict(dataset_meta=dict(classes=[*CLASSES])),
        untold=dict(),
        reversed=dict(dataset_meta=dict(classes=CLASSES[::-1])),
        mmdet2=dict(CLASSES=CLASSES[::-1]),
        superset=dict(dataset_meta=dict(classes=(*CLASSES, 'ring'))),
    )
    for name, meta in metas.items():
        save(cfg, tmp_path / f'{name}.pth', meta)
        command = ('test.py', 'small.py', f'{name}.pth', '--work-dir', 'run')
        expected = r'error: test dataset: its 4 classes .* are not the .*label \d is .* one label would stand'
        if name in ('same', 'untold'):
            call(*command)
        else:
            error = call(*command, code=1).err.splitlines()[-1]
            assert f'{name}.pth (' in error, error
            with pytest.raises(DataError, match=expected):
                raise DataError(error)
    # The heads alone can tell, where the checkpoint does not.
    cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = 5
    cfg.dump(tmp_path / 'five.py')
    save(cfg, tmp_path / 'five.pth', {})
    error = call('test.py', 'five.py', 'five.pth', '--work-dir', 'run', code=1).err.splitlines()[-1]
    assert 'num_classes=5, but the test dataset has 4 classes' in error, error


def test_a_run_resumes_with_the_same_classes_and_starts_from_any(small_run_cfg: Callable[..., Config]) -> None:
    cfg = small_run_cfg(max_iters=2, depths=(1, 1, 1, 1))
    cfg.custom_hooks = cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    Runner.from_cfg(cfg.copy()).train()
    path = Path(cfg.work_dir) / 'iter_2.pth'
    checkpoint = torch.load(path, weights_only=False)
    checkpoint['meta']['dataset_meta']['classes'] = CLASSES[::-1]
    torch.save(checkpoint, path)
    cfg.train_cfg.max_iters, cfg.load_from, cfg.resume = 3, str(path), True
    with pytest.raises(DataError, match=r"iter_2\.pth .*'star' there"):
        Runner.from_cfg(cfg.copy()).train()
    # A fine-tuning learns other classes.
    cfg.resume = False
    Runner.from_cfg(cfg.copy()).train()


def test_files_whose_palettes_differ_are_compared_with_the_heads(root: Path) -> None:
    parts = [dataset_cfg(root, 'val', metainfo=dict(classes=('cat', 'dog'), palette=[(i, 0, 0)] * 2)) for i in (1, 2)]
    both = DATASETS.build(dict(type='ConcatDataset', datasets=parts))
    assert isinstance(both.metainfo, list)
    model = nn.ModuleDict(dict(bbox_head=nn.Identity()))
    model.bbox_head.num_classes = 2
    check_num_classes(model, both, 'val')
    model.bbox_head.num_classes = 3
    with pytest.raises(DataError, match='num_classes=3, but the val dataset has 2'):
        check_num_classes(model, both, 'val')
