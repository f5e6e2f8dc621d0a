"""A trained LayerNorm detector is converted, fine-tuned and fused, all through real files and runs."""
import copy

import pytest
import torch
from conftest import CONFIGS
from mmengine.config import Config
from mmengine.runner import Runner

import slab_det
from slab_det.conversion import ConversionError
from slab_det.datasets.recalibration import recalibration_dataloader
from slab_det.detectors import build_detector
from slab_det.finetune import convert_detector
from slab_det.fusion import FusionError
from slab_det.layers import PRepBN

STOCK_SWIN = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))


def layernorm_run(small_run_cfg, backbone):
    cfg = small_run_cfg('layernorm', max_iters=2, norm_cfg=dict(type='LN'))
    cfg.custom_hooks = []
    if backbone:
        cfg.model.backbone = dict(backbone)
    return cfg


@pytest.fixture
def schedule(small_run_cfg):
    """What a user would write in a file: two iterations, the decay in the first half."""
    cfg = small_run_cfg('schedule', max_iters=2)
    hooks = [dict(type='ProgressiveNormHook', total=0.5), dict(type='RecalibrateFuseHook', num_images=4, max_passes=2)]
    return Config(dict(train_cfg=cfg.train_cfg, optim_wrapper=cfg.optim_wrapper, param_scheduler=cfg.param_scheduler,
                       custom_hooks=hooks))


# SLABSwin goes the same way in tests/e2e/test_commands.py.
def test_stock_layernorm_detector_ends_without_norms(small_run_cfg, schedule, tmp_path):
    cfg = layernorm_run(small_run_cfg, STOCK_SWIN)
    Runner.from_cfg(copy.deepcopy(cfg)).train()
    trained = tmp_path / 'layernorm' / 'iter_2.pth'
    checkpoint, config, report = convert_detector(cfg, str(trained), tmp_path / 'out' / 'prepbn.pth', schedule,
                                                  recalibration_dataloader(cfg, 4))
    assert len(report.converted) == len(report.explained) and not report.kept

    new_cfg = Config.fromfile(config)
    before, after = build_detector(cfg, str(trained)), build_detector(new_cfg, str(checkpoint))
    norms = [m for m in after.modules() if isinstance(m, PRepBN)]
    assert len(norms) == len(report.converted) and {norm.gamma for norm in norms} == {1.0}
    assert any(norm.repbn.running_mean.any() for norm in norms)
    images = torch.randn(1, 3, 70, 90)
    with torch.no_grad():
        for one, other in zip(before.extract_feat(images), after.extract_feat(images), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(FusionError, match='gamma = 1'):
        slab_det.fuse(after)

    new_cfg.work_dir, new_cfg.experiment_name = str(tmp_path / 'finetune'), f'{tmp_path.name}-finetune'
    Runner.from_cfg(new_cfg).train()
    fused = build_detector(Config.fromfile(tmp_path / 'finetune' / 'fused_config.py'),
                           str(tmp_path / 'finetune' / 'fused.pth'))
    assert not [m for m in fused.backbone.modules() if isinstance(m, (PRepBN, torch.nn.LayerNorm))]


def test_default_schedule_ends_an_endless_sampler(small_run_cfg, tmp_path):
    cfg = layernorm_run(small_run_cfg, None)
    source = tmp_path / 'random.pth'
    torch.save(dict(state_dict=build_detector(cfg).state_dict()), source)
    schedule = Config.fromfile(CONFIGS / '_base_/schedules/finetune_prepbn.py')
    _, config, report = convert_detector(cfg, str(source), tmp_path / 'prepbn.pth', schedule)
    new_cfg = Config.fromfile(config)
    assert cfg.train_dataloader.sampler.type == 'InfiniteSampler'
    assert new_cfg.train_dataloader.sampler.type == 'DefaultSampler'
    assert new_cfg.train_cfg.max_epochs == 3 and new_cfg.load_from == str(tmp_path / 'prepbn.pth')
    assert [hook.type for hook in new_cfg.custom_hooks] == ['ProgressiveNormHook', 'RecalibrateFuseHook']
    assert not report.explained, 'nothing to calibrate on was given'


def test_a_detector_without_layernorm_is_refused(small_run_cfg, schedule, tmp_path):
    cfg = small_run_cfg('prepbn')
    source = tmp_path / 'random.pth'
    torch.save(dict(state_dict=build_detector(cfg).state_dict()), source)
    with pytest.raises(ConversionError, match='no LayerNorm'):
        convert_detector(cfg, str(source), tmp_path / 'out.pth', schedule)
    assert not (tmp_path / 'out.pth').exists()
