"""mmdet's own tools/train.py trains, recalibrates and fuses README's config; nothing of ours runs but the import."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mmdet
from conftest import CONFIGS, SMALL_SWIN
from mmengine.config import Config

from slab_det.measure.report import read_report

ROOT = CONFIGS.parent
DATA = ('train_dataloader', 'val_dataloader', 'test_dataloader', 'val_evaluator', 'test_evaluator')
# Both import mmdet's models before the config has its custom_imports: slab_det comes first, as docs/train.md says.
MMDET_TRAIN = 'import runpy, slab_det; runpy.run_path({script!r}, run_name="__main__")'


def small_config(folder: Path, run_cfg: Config) -> Path:
    """README's config with a small net, and two generated images in an epoch."""
    (config,) = re.findall(r'^python tools/train.py (\S+)', (ROOT / 'README.md').read_text(), re.MULTILINE)
    cfg = Config.fromfile(ROOT / config)
    cfg.model.backbone.update(SMALL_SWIN, norm_cfg=cfg.model.backbone.norm_cfg, init_cfg=None)
    cfg.model.neck.in_channels = run_cfg.model.neck.in_channels
    cfg.model.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
    cfg.model.train_cfg.rcnn.sampler.num = 32
    for head in (cfg.model.roi_head.bbox_head, cfg.model.roi_head.mask_head):
        head.num_classes = 4
    # Config.update would merge.
    for key in DATA:
        cfg[key] = run_cfg[key]
    cfg.train_dataloader.sampler = dict(type='DefaultSampler', shuffle=True)
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.generator = dict(num_train=2, num_val=2, size=(96, 80))
    cfg.train_cfg.max_epochs = 2
    cfg.dump(folder / 'small.py')
    return folder / 'small.py'


def test_mmdets_train_script_needs_no_patch_of_ours(tmp_path: Path, small_run_cfg) -> None:
    config = small_config(tmp_path, small_run_cfg())
    script = str(Path(mmdet.__file__).parent / '.mim/tools/train.py')
    done = subprocess.run(
        [sys.executable, '-c', MMDET_TRAIN.format(script=script), str(config), '--work-dir', 'run'],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (tmp_path / 'run' / 'epoch_2.pth').is_file() and (tmp_path / 'run' / 'fused.pth').is_file()
    entries = {entry.variant: entry for entry in read_report(tmp_path / 'run' / 'report.json')}
    assert entries['unfused'].recalibration['num_norms']
    fusion = entries['fused'].fusion
    assert fusion['folded'] and not fusion['kept'] and fusion['difference']['float64'] <= 1e-9
