"""The hard data set is right COCO, and its teachers train in parts in bfloat16."""

import sys
from collections import OrderedDict
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn

from benchmarks.hard import make_data
from benchmarks.hard.bfloat16 import PartsInBFloat16

CLASSES = ('disc', 'ring', 'square')


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of sprites, two for each class, and of photographs."""
    sprites, photographs = tmp_path / 'sprites', tmp_path / 'photographs'
    grid = np.hypot(*np.mgrid[-40:40, -40:40])
    shapes = dict(disc=grid < 36, ring=(grid < 36) & (grid > 18), square=np.ones_like(grid, bool))
    for name, shape in shapes.items():
        (sprites / name).mkdir(parents=True)
        for number in range(2):
            picture = np.full((80, 80, 4), 80 + 100 * number, np.uint8)
            picture[..., 3] = 255 * shape
            cv2.imwrite(str(sprites / name / f'{number}.png'), picture)
    photographs.mkdir()
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 255, (90, 120, 3), np.uint8)
        cv2.imwrite(str(photographs / f'{number}.jpg'), noise)
    return sprites, photographs


def generate(inputs: tuple[Path, Path], out: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Path:
    arguments = dict(sprites=inputs[0], photographs=inputs[1], out=out, train=4, val=3, seed=seed)
    monkeypatch.setattr(sys, 'argv', ['make_data', *(f'--{key}={value}' for key, value in arguments.items())])
    make_data.main()
    return out


def read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_hard_data_is_coco_and_the_same_for_a_seed(inputs, tmp_path, monkeypatch) -> None:
    data = generate(inputs, tmp_path / 'a', monkeypatch)
    assert read(data) == read(generate(inputs, tmp_path / 'b', monkeypatch))
    assert read(data) != read(generate(inputs, tmp_path / 'c', monkeypatch, seed=1))

    for split, count in dict(train=4, val=3).items():
        truth = COCO(str(data / 'annotations' / f'instances_{split}.json'))
        assert len(truth.imgs) == count and [cat['name'] for cat in truth.cats.values()] == list(CLASSES)
        for kind in ('bbox', 'segm'):
            found = truth.loadRes([dict(ann, score=1.0) for ann in truth.dataset['annotations']])
            evaluation = COCOeval(truth, found, kind)
            evaluation.evaluate(), evaluation.accumulate(), evaluation.summarize()
            assert evaluation.stats[0] > 0.999, f'{split}: its own {kind} has AP {evaluation.stats[0]}'
        for image in truth.imgs.values():
            pixels = cv2.imread(str(data / 'images' / split / image['file_name']))
            assert pixels.shape[:2] == (image['height'], image['width'])
            masks = [truth.annToMask(ann) for ann in truth.loadAnns(truth.getAnnIds(image['id']))]
            assert masks and np.sum(masks, axis=0).max() == 1, 'visible parts do not overlap'
        crops = list((data / 'crops' / split).glob('*/*.jpg'))
        assert sorted(path.name for path in (data / 'crops' / split).iterdir()) == list(CLASSES)
        assert len(crops) == len(truth.anns)


def test_photographs_of_train_and_val_differ(inputs, tmp_path, monkeypatch) -> None:
    used = {}

    def record(out: Path, split: str, seeds: list, classes: list, sprites: list, photographs: list[Path]) -> None:
        used[split] = {path.name for path in photographs}

    monkeypatch.setattr(make_data, 'write_split', record)
    generate(inputs, tmp_path / 'a', monkeypatch)
    assert used == dict(val={'0.jpg'}, train={'1.jpg', '2.jpg'})


def test_parts_train_in_bfloat16_and_evaluate_in_float32() -> None:
    model = nn.Sequential(OrderedDict(backbone=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    wrapper = PartsInBFloat16(parts=['backbone'], optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, 4)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        return model.backbone(x), model(x)

    exact, _ = compute()
    with wrapper.optim_context(model):
        hidden, output = compute()
    assert hidden.dtype == output.dtype == torch.float32
    assert hidden.equal(hidden.bfloat16().float()) and not hidden.equal(exact), 'computed in bfloat16'
    assert output.equal(model.head(hidden)), 'the rest is not'
    wrapper.backward(output.sum())
    assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())
    assert 'forward' not in vars(model.backbone), 'as before the training step'
