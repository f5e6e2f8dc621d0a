"""docs/get-started.md as a reader follows it: the folder, the config, the commands, and a picture."""

import re
import shlex
from pathlib import Path

from conftest import CONFIGS, SMALL_SWIN
from mmengine.config import Config

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
