"""Every kind of config, made small, goes the whole way: a training iteration, recalibration, fusion.

tests/test_configs.py has what the others differ in: size, schedule, masks, or one norm by moving averages for another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import CONFIGS, as_trained, layer_norms
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.runner import CheckpointLoader, Runner
from torch import nn
from zoo import shrunk

import slab_det
from slab_det.measure.report_file import read_report
from slab_det.norms import ChannelAffine, OfflineNorm, named_offline_norms, named_progressive_norms

ROWS = ('swin_t', 'prepbn_swin_t_official', 'slab_swin_t', 'flatten_swin_t', 'bn_ffnbn_swin_t_3x', 'un_swin_t_3x')
ROWS += ('pvt_t', 'prepbn_pvt_t', 'slab_pvt_t', 'slab_cswin_t')
NAMES = ['faster_rcnn_prepbn_swin_t', *(f'mask_rcnn_{row}' for row in ROWS)]


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # All runs read the same images.
    monkeypatch.setenv('SLAB_DET_CACHE', str(tmp_path.parent / 'images'))
    return tmp_path


def shrink(cfg: Config, work_dir: Path) -> Config:
    """The twin of a config: fewer channels, heads, blocks, pixels and images; everything else is the config's own."""
    cfg.model = shrunk(cfg.model.to_dict(), {})
    model, backbone = cfg.model, cfg.model.backbone
    ratios = (1, 2, 5, 8) if backbone.type == 'SLABPVT' else (1, 2, 4, 8)
    model.neck.in_channels = [8 * ratio for ratio in ratios]
    backbone.update(embed_dims=8, pretrain_img_size=64)
    if backbone.type == 'SLABPVT':
        backbone.num_layers = (1, 1, 1, 1)
    else:
        backbone.update(num_heads=(2, 2, 4, 8), depths=(2, 1, 1, 1))
    if 'window_sizes' in backbone:
        backbone.window_sizes = tuple(side if side <= 7 else side // 5 for side in backbone.window_sizes)
    backbone.init_cfg = None
    for name in ('bbox_head', 'mask_head'):
        if model.roi_head.get(name):
            model.roi_head[name].num_classes = 4

    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset = dict(
            type='SyntheticShapes',
            split='train',
            generator=dict(num_train=2, num_val=1, size=(96, 80)),
            pipeline=shrunk(loader.dataset.pipeline, {}),
            test_mode=loader.dataset.get('test_mode', False),
            serialize_data=False,
        )  # it collects all garbage of the process
        loader.num_workers = 0
        loader.persistent_workers = False
    # Two images: one iteration, whether the run counts epochs or iterations.
    cfg.train_dataloader.batch_size = 2
    for key in ('max_epochs', 'max_iters'):
        if key in cfg.train_cfg:
            cfg.train_cfg[key] = 1
    # Scores of one iteration say nothing.
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    for hook in cfg.get('custom_hooks', []):
        if hook.type == 'RecalibrateFuseHook':
            hook.update(num_images=2)
    cfg.work_dir = str(work_dir)
    cfg.experiment_name = work_dir.name
    cfg.log_level = 'WARNING'
    cfg.randomness = dict(seed=0)
    return cfg


@pytest.mark.parametrize('name', NAMES)
def test_config_trains_recalibrates_and_fuses(name, work_dir):
    cfg = shrink(Config.fromfile(CONFIGS / f'{name}.py'), work_dir)
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.iter == 1

    model = runner.model.eval()
    hooks = {hook.type for hook in cfg.get('custom_hooks', [])}
    offline = dict(named_offline_norms(model))
    assert bool(offline) == ('RecalibrateFuseHook' in hooks) == (work_dir / 'fused.pth').is_file()
    assert all(norm.gamma == 0 for norm in named_progressive_norms(model).values())

    # tests/fusion compares the outputs, with random statistics.
    fused = slab_det.fuse(as_trained(model))
    left = [path for path, module in fused.named_modules() if isinstance(module, OfflineNorm | ChannelAffine)]
    assert not left, fused.fusion_report
    if offline:
        # The released recipe trains LayerNorms on the four outputs.
        assert len(layer_norms(fused)) == (4 if name.endswith('official') else 0), layer_norms(fused)
    # PVT's LayerNorm has another eps.
    eps = {norm.eps for norm in model.modules() if isinstance(norm, nn.LayerNorm)}
    assert eps <= {1e-6 if 'pvt' in name else 1e-5}, eps
    if not offline:
        return
    unfused, fused_entry = read_report(work_dir / 'report.json')
    if not name.endswith('official'):
        assert unfused.recalibration['num_norms'] == len(offline)
    assert fused_entry.fusion['difference']['float64'] <= 1e-9
    rebuilt = MODELS.build(Config.fromfile(work_dir / 'fused_config.py').model)
    rebuilt.load_state_dict(CheckpointLoader.load_checkpoint(str(work_dir / 'fused.pth'))['state_dict'])
