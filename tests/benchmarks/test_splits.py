"""The sets of the benchmarks are made of their public sources' files, and are right COCO for our configs."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from conftest import CONFIGS
from mmdet.registry import DATASETS

from benchmarks import splits
from slab_det.cli.config import read_config
from slab_det.preflight import check_data

RNG = np.random.default_rng(0)
VOC_OBJECT = (
    '<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>'
)


def load(config: str, root: Path, split: str) -> list[dict]:
    """What training would see: the file, the boxes and the labels of each image."""
    cfg = read_config(str(CONFIGS.parent / 'benchmarks' / config), None, str(root))
    check_data(cfg, ('train', 'val'))
    settings = cfg[f'{split}_dataloader'].dataset
    settings.update(pipeline=[], filter_cfg=None)
    return [
        dict(info, name=Path(info['img_path']).name) for info in map(DATASETS.build(settings).get_data_info, range(3))
    ]


def test_bccd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / 'BCCD_Dataset' / 'BCCD'
    for folder in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
        (source / folder).mkdir(parents=True)
    lists = dict(trainval=('cell_4', 'cell_2', 'cell_5'), test=('cell_3', 'cell_1', 'cell_0'))
    for name, stems in lists.items():
        (source / f'ImageSets/Main/{name}.txt').write_text('\n'.join(stems) + '\n')
        for number, stem in enumerate(sorted(stems)):
            PIL.Image.fromarray(RNG.integers(0, 256, (48, 64, 3), np.uint8)).save(source / f'JPEGImages/{stem}.jpg')
            # The second object has no width.
            objects = [('WBC', 3, 4, 23, 34 + number), ('RBC', 9, 9, 9, 20), ('Platelets', 40, 5, 60, 20)]
            text = ''.join(VOC_OBJECT.format(*values) for values in objects)
            size = '<size><width>64</width><height>48</height></size>'
            (source / f'Annotations/{stem}.xml').write_text(f'<annotation>{size}{text}</annotation>')
    out = tmp_path / 'bccd'
    monkeypatch.setattr('sys.argv', ['splits.py', 'bccd', str(source.parent), '--out', str(out)])
    splits.main()
    for split, stems in dict(train=lists['trainval'], val=lists['test']).items():
        found = load('bccd/faster_rcnn_swin_small.py', out, split)
        assert [info['name'] for info in found] == [f'{stem}.jpg' for stem in sorted(stems)]
        boxes = [[instance['bbox'] for instance in info['instances']] for info in found]
        assert boxes == [[[3, 4, 23, 34 + number], [40, 5, 60, 20]] for number in range(3)]
        assert [[instance['bbox_label'] for instance in info['instances']] for info in found] == [[1, 2]] * 3
        original = source / 'JPEGImages' / found[0]['name']
        assert Path(found[0]['img_path']).read_bytes() == original.read_bytes()
    (source / 'Annotations/cell_3.xml').unlink()
    with pytest.raises(SystemExit, match='cell_3.xml is not there: give the folder'):
        splits.main()


def test_dsb2018(tmp_path: Path) -> None:
    source, out = tmp_path / 'stage1_train', tmp_path / 'dsb2018'
    # By the first letters: dark, bright and coloured images of the same size.
    values = dict(d=20, b=220, c=(200, 100, 180))
    for letter, number in [(letter, number) for letter in values for number in range(6)]:
        name = f'{letter}{number}' * 32
        for folder in ('images', 'masks'):
            (source / name / folder).mkdir(parents=True)
        pixels = np.zeros((60, 80, 4), np.uint8)
        pixels[..., :3], pixels[..., 3] = values[letter], 255
        PIL.Image.fromarray(pixels).save(source / name / 'images' / f'{name}.png')
        for index, (top, left) in enumerate(((5, 6), (30, 20 + number))):
            mask = np.zeros((60, 80), np.uint8)
            mask[top : top + 10, left : left + 20] = 255
            PIL.Image.fromarray(mask).save(source / name / 'masks' / f'{index}.png')
    splits.make_dsb2018(source, out)
    found = {split: load('dsb2018/mask_rcnn_swin_small.py', out, split) for split in ('train', 'val')}
    # One of the six images of each group, as seed 0 chose those of the studies; groups stand in alphabetical order.
    assert [info['name'][:2] for info in found['val']] == ['c4', 'b4', 'd5']
    for info in found['val']:
        first, second = info['instances']
        assert first['bbox'] == [6, 5, 26, 15] and second['bbox'][0] == 20 + int(info['name'][1])
        assert splits.coco_mask.area(first['mask']) == 200 and len(info['name']) == 16 + len('.jpg')
        with PIL.Image.open(info['img_path']) as image:
            difference = np.asarray(image).astype(int) - values[info['name'][0]]
        assert image.size == (80, 60) and abs(difference).max() <= 3
    names = {path.name for path in (out / 'images').rglob('*.jpg')}
    assert len(names) == 18 and len([*(out / 'images/train').iterdir()]) == 15
