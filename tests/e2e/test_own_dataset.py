"""docs/get-started.md as a reader follows it: the folder, the config, the commands, and a picture."""

import json
import re
import shlex
from pathlib import Path

from conftest import CONFIGS, SMALL_SWIN, narrow_heads
from mmengine.config import Config
from PIL import Image

import slab_det
from slab_det.measure.report_file import read_report

PAGE = (CONFIGS.parent / 'docs' / 'get-started.md').read_text().partition('## Your own dataset')[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```', PAGE, flags=re.MULTILINE | re.DOTALL)


def shrink(path: Path) -> None:
    """Makes the detector of a config small and its training short; data, classes, norms and hooks stay."""
    cfg = Config.fromfile(path)
    cfg.model.backbone.update(SMALL_SWIN, norm_cfg=cfg.model.backbone.norm_cfg, init_cfg=None)
    cfg.model.neck.in_channels = [SMALL_SWIN['embed_dims'] * 2**i for i in range(4)]
    narrow_heads(cfg.model)
    cfg.model.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
    cfg.model.test_cfg.rcnn.max_per_img = 10
    cfg.model.train_cfg.rcnn.sampler.num = 32
    resize = dict(type='Resize', scale=(96, 80), keep_ratio=True)
    cfg.train_dataloader.dataset.pipeline[3] = cfg.val_dataloader.dataset.pipeline[1] = resize
    cfg.test_dataloader.dataset.pipeline[1] = resize
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.update(num_workers=0, persistent_workers=False)
    cfg.train_cfg.max_epochs = 1
    cfg.dump(path)


def test_from_a_folder_to_a_fused_detector(tmp_path, monkeypatch, call):
    (train,), (test,) = (block.replace('\\\n', ' ').splitlines() for block in blocks('bash')[:2])
    generate, config, use = blocks('python')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').symlink_to(CONFIGS)
    namespace = {}
    exec(generate.replace("('data/mine'", "('data/mine', num_train=4, num_val=2, size=(96, 80)"), namespace)
    (tmp_path / 'my_detector.py').write_text(config)
    shrink(tmp_path / 'my_detector.py')
    for command in (train, f'{test} --rounds 2 --warmup 1 --size 64 96'):
        python, tool, *arguments = shlex.split(command)
        call(Path(tool).name, *arguments)
    entries = {entry.variant: entry for entry in read_report('work_dirs/my_detector/report.json')}
    assert entries['fused'].fusion['folded'] and not entries['fused'].fusion['kept']
    assert entries['unfused'].dataset['images'] == 2 and list(tmp_path.glob('work_dirs/test/*/drawn/*'))
    exec(use, namespace)
    assert (tmp_path / 'out' / 'vis' / '00000.png').is_file()
    assert namespace['detector'].model.dataset_meta['classes'] == slab_det.data.SyntheticShapes.METAINFO['classes']


def write_voc(folder: Path) -> None:
    """A folder as Pascal VOC has it, with the generated images."""
    for split in ('train', 'val'):
        content = json.loads((folder / f'annotations/instances_{split}.json').read_text())
        names = {one['id']: one['name'] for one in content['categories']}
        for part in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / f'ImageSets/Main/{split}.txt').write_text(''.join(f'{split}_{x["id"]}\n' for x in content['images']))
        for image in content['images']:
            objects = ''
            for item in content['annotations']:
                x, y, width, height = item['bbox']
                corners = dict(xmin=x + 1, ymin=y + 1, xmax=x + width, ymax=y + height)
                box = ''.join(f'<{key}>{value:.0f}</{key}>' for key, value in corners.items())
                if item['image_id'] == image['id']:
                    objects += f'<object><name>{names[item["category_id"]]}</name><bndbox>{box}</bndbox></object>'
            size = f'<size><width>{image["width"]}</width><height>{image["height"]}</height></size>'
            stem = f'{split}_{image["id"]}'
            (folder / f'Annotations/{stem}.xml').write_text(f'<annotation>{size}{objects}</annotation>')
            Image.open(folder / f'images/{split}' / image['file_name']).save(folder / f'JPEGImages/{stem}.jpg')


def test_a_folder_of_pascal_voc_trains_with_what_the_page_says(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').symlink_to(CONFIGS)
    slab_det.data.generate('data/mine', num_train=2, num_val=1, size=(96, 80))
    write_voc(tmp_path / 'data/mine')
    config = blocks('python')[1]
    starts = ("type='VOC", "ann_file='ImageSets", r'data_prefix=dict\(_', 'val_evaluator = ')
    dataset, ann_file, prefix, evaluator = (re.search(rf'`({start}.*?)`', PAGE, re.DOTALL)[1] for start in starts)
    for split in ('train', 'val'):
        config = config.replace(f"ann_file='annotations/instances_{split}.json'", ann_file.replace('train', split))
        config = config.replace(f"data_prefix=dict(img='images/{split}/')", f'{dataset}, {prefix}')
    config = re.sub('^val_evaluator = .*$', evaluator, config, flags=re.MULTILINE)
    (tmp_path / 'voc.py').write_text(f'{config}\ncustom_hooks = []\n')
    shrink(tmp_path / 'voc.py')
    assert 'pascal_voc/mAP: ' in call('train.py', 'voc.py').out
