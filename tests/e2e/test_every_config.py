"""Every row of the configs, made small, goes the whole way: a real training iteration, recalibration, fusion.

The Faster R-CNN of a row is its Mask R-CNN without masks (tests/test_configs.py), so one Faster R-CNN stands for all,
and larger models differ in the numbers that are made small.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS, raw_outputs, relative_difference
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import CheckpointLoader, Runner

import slab_det
from slab_det.measure.report import read_report
from slab_det.norms import ChannelAffine, OfflineNorm, named_offline_norms, named_progressive_norms

NAMES = sorted(path.stem for path in CONFIGS.glob('*.py') if not re.match(r'faster|.*_s$', path.stem))
NAMES.append('faster_rcnn_prepbn_swin_t')
# Keys of a detector's config that count channels.
CHANNELS = ('in_channels', 'out_channels', 'feat_channels', 'conv_out_channels', 'fc_out_channels')
# Keys of a pipeline that hold image sizes.
SIZES = ('scale', 'scales', 'crop_size')


class RandomBiases(Hook):
    """Random scales, shifts, biases and etas, no position table of zeros: zeros and ones hide what a fold forgets.

    The other weights stay near their initial values. A deep network of wholly random ones is chaotic: its
    recalibration does not settle, and float64 rounding grows beyond what is to be measured.
    """

    def before_train(self, runner: Runner) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in runner.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim <= 1:
                parameter.data.copy_(0.5 * noise)
            else:
                parameter.data.add_(0.02 * noise)


@pytest.fixture(scope='module')
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('images')


@pytest.fixture
def work_dir(tmp_path: Path, image_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv('SLAB_DET_CACHE', str(image_cache))
    return tmp_path


def change_values(config: object, keys: tuple[str, ...], change: Callable[[int], int]) -> None:
    """Changes every whole number under one of ``keys``, at any depth, in place."""
    for key, value in list(config.items() if isinstance(config, dict) else enumerate(config)):
        if isinstance(config, dict) and key in keys:
            config[key] = changed(value, change)
        elif isinstance(value, dict | list | tuple):
            change_values(value, keys, change)


def changed(value: object, change: Callable[[int], int]) -> object:
    if isinstance(value, list | tuple):
        return type(value)(changed(item, change) for item in value)
    return change(value)


def shrink(cfg: Config, work_dir: Path) -> Config:
    """The twin of a config: fewer channels, heads, blocks, pixels and images; everything else is the config's own."""
    model, backbone = cfg.model, cfg.model.backbone
    for part in ('neck', 'rpn_head', 'roi_head'):
        change_values(model[part], CHANNELS, lambda channels: channels // 16)
    if backbone.type == 'SLABSwin':
        backbone.embed_dims //= 8 if backbone.embed_dims < 96 else 12
        backbone.num_heads = (1, 2, 4, 8)
        backbone.depths = tuple(max(2, depth // 6) for depth in backbone.depths)
        if 'window_sizes' in backbone:
            backbone.window_sizes = tuple(side if side <= 7 else side // 5 for side in backbone.window_sizes)
        model.neck.in_channels = [backbone.embed_dims * 2**i for i in range(4)]
    elif backbone.type == 'SLABCSwin':
        backbone.update(embed_dims=8, num_heads=(2, 2, 4, 4), pretrain_img_size=64)
        backbone.depths = tuple(max(1, depth // 9) for depth in backbone.depths)
        model.neck.in_channels = [8, 16, 32, 64]
    else:
        backbone.embed_dims = 8
        backbone.num_layers = tuple(max(1, depth // 3) for depth in backbone.num_layers)
        model.neck.in_channels = [8 * heads for heads in (1, 2, 5, 8)]
    backbone.init_cfg = None
    for name in ('bbox_head', 'mask_head'):
        if model.roi_head.get(name):
            model.roi_head[name].num_classes = 4
    model.test_cfg.rpn.max_per_img = 20

    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        change_values(loader.dataset.pipeline, SIZES, lambda side: side // 8 if side > 200 else side // 2)
        loader.dataset = dict(
            type='SyntheticShapes',
            split='train',
            generator=dict(num_train=2, num_val=1, size=(96, 80)),
            pipeline=loader.dataset.pipeline,
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
    runner.register_hook(RandomBiases(), priority='HIGHEST')
    runner.train()
    assert runner.iter == 1

    model = runner.model.eval()
    hooks = {hook.type for hook in cfg.get('custom_hooks', [])}
    offline = dict(named_offline_norms(model))
    assert bool(offline) == ('RecalibrateFuseHook' in hooks) == (work_dir / 'fused.pth').is_file()
    assert all(norm.gamma == 0 for norm in named_progressive_norms(model).values())

    model.double()
    fused = slab_det.fuse(model)
    left = [path for path, module in fused.named_modules() if isinstance(module, OfflineNorm | ChannelAffine)]
    assert not left, fused.fusion_report
    images = torch.randn(1, 3, 107, 139).double()
    assert relative_difference(raw_outputs(fused, images), raw_outputs(model, images)) <= 1e-9
    if not offline:
        return
    unfused, fused_entry = read_report(work_dir / 'report.json')
    if not name.endswith('official'):
        assert unfused.recalibration['num_norms'] == len(offline)
    assert fused_entry.fusion['difference']['float64'] <= 1e-9
    rebuilt = MODELS.build(Config.fromfile(work_dir / 'fused_config.py').model)
    rebuilt.load_state_dict(CheckpointLoader.load_checkpoint(str(work_dir / 'fused.pth'))['state_dict'])
