"""The generated images: reproducible, correctly annotated, read by the ordinary dataset and evaluator."""

import hashlib
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from slab_det.common.errors import DataError
from slab_det.data.synthetic import CLASSES, SyntheticShapes, draw_image, generate

SMALL = {'num_train': 6, 'num_val': 5, 'size': (96, 80), 'seed': 3}


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp('cache') / 'shapes', **SMALL)


def digest(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob('*'))
        if path.is_file()
    }


def test_images_depend_only_on_seed_split_and_index(root: Path, tmp_path: Path) -> None:
    assert digest(generate(tmp_path / 'again', **SMALL)) == digest(root)
    other = generate(tmp_path / 'other', **{**SMALL, 'seed': 4})
    pictures = [value for tree in (root, other) for name, value in digest(tree).items() if name.endswith('.png')]
    assert len(pictures) == len(set(pictures)) == 2 * (SMALL['num_train'] + SMALL['num_val'])
    longer = digest(generate(tmp_path / 'longer', **{**SMALL, 'num_train': 8}))
    for name, value in digest(root).items():
        assert longer[name] == value or not name.endswith('.png'), name


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('SLAB_DET_CACHE', str(tmp_path / 'mine'))
    first = generate(**SMALL)
    assert first.parent == tmp_path / 'mine'
    assert generate(**SMALL) == first == Path(SyntheticShapes('val', generator=SMALL).data_root)
    assert generate(**{**SMALL, 'seed': 5}) != first


def test_processes_that_generate_at_once_agree(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context('fork')) as pool:
        roots = list(pool.map(generate_small, [tmp_path / 'shared'] * 2))
    assert roots == [tmp_path / 'shared'] * 2
    assert [path.name for path in tmp_path.iterdir()] == ['shared']


def generate_small(root: Path) -> Path:
    return generate(root, **SMALL)


def test_a_folder_that_was_generated_otherwise_is_an_error(root: Path, tmp_path: Path) -> None:
    (tmp_path / 'notes.txt').touch()
    for folder, arguments in ((tmp_path, SMALL), (root, {**SMALL, 'seed': 4})):
        with pytest.raises(DataError, match='was generated with .* choose another folder'):
            generate(folder, **arguments)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / 'data').mkdir()
    assert (generate_small(tmp_path / 'data') / 'generator.json').is_file()


def test_boxes_and_areas_match_the_polygons(root: Path) -> None:
    width, height = SMALL['size']
    for found in json.loads((root / 'annotations' / 'instances_train.json').read_text())['annotations']:
        canvas = np.zeros((height, width), bool)
        for polygon in found['segmentation']:
            assert len(polygon) >= 6 and len(polygon) % 2 == 0
            canvas |= coco_mask.decode(coco_mask.frPyObjects([polygon], height, width))[..., 0].astype(bool)
        rows, columns = np.nonzero(canvas)
        box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
        assert (found['area'], found['bbox'], found['iscrowd']) == (canvas.sum(), box, 0)
        assert found['category_id'] in range(1, len(CLASSES) + 1)


def test_objects_are_visible_and_do_not_share_pixels() -> None:
    for seed in range(20):
        pixels, objects = draw_image(np.random.default_rng(seed), (192, 160))
        assert pixels.shape == (160, 192, 3) and pixels.dtype == np.uint8
        masks = [
            coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(found['segmentation'], 160, 192)))
            for found in objects
        ]
        assert masks, seed
        # A pixel belongs to the object on top; polygons are exact to the pixel but for slivers they leave out.
        overlap = (np.sum(masks, 0) > 1).sum()
        assert overlap <= 0.01 * np.sum(masks), (seed, overlap)
