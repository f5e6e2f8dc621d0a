"""A trained LayerNorm detector becomes a PRepBN detector with a config for its fine-tune, through real files."""

import pytest
import torch
from conftest import CONFIGS, randomize
from mmdet.apis import DetInferencer
from mmengine.config import Config

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.conversion import ConversionError, convert_detector, write_tune_config
from slab_det.fusion import FusionError
from slab_det.norms import PRepBN

STOCK_SWIN = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))


def layernorm_run(small_run_cfg, backbone):
    cfg = small_run_cfg('layernorm', max_iters=2, norm_cfg=dict(type='LN'))
    cfg.custom_hooks = []
    if backbone:
        cfg.model.backbone = dict(backbone)
    return cfg


@pytest.fixture
def schedule():
    """A schedule as a user would write it in a file."""
    hooks = [dict(type='ProgressiveNormHook', total=0.5), dict(type='RecalibrateFuseHook', num_images=4, max_passes=2)]
    return Config(dict(train_cfg=dict(type='IterBasedTrainLoop', max_iters=2), custom_hooks=hooks))


# tests/e2e/test_commands.py trains and fuses a converted SLABSwin.
def test_stock_layernorm_detector_computes_the_same_after_conversion(small_run_cfg, tmp_path):
    cfg = layernorm_run(small_run_cfg, STOCK_SWIN)
    before = build_detector(cfg)
    randomize(before, 0)
    torch.save(dict(state_dict=before.state_dict()), tmp_path / 'trained.pth')
    schedule = Config.fromfile(CONFIGS / '_base_/schedules/finetune_prepbn.py')
    out = tmp_path / 'out' / 'prepbn.pth'
    checkpoint, config, report = convert_detector(cfg, str(tmp_path / 'trained.pth'), out, schedule)
    assert not report.kept and all(name.startswith('backbone.') for name in report.converted)

    new_cfg = Config.fromfile(config)
    after = build_detector(new_cfg, str(checkpoint))
    norms = [m for m in after.modules() if isinstance(m, PRepBN)]
    assert len(norms) == len(report.converted) and {norm.gamma for norm in norms} == {1.0}
    images = torch.randn(1, 3, 70, 90)
    with torch.no_grad():
        for one, other in zip(before.extract_feat(images), after.extract_feat(images), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(FusionError, match='gamma = 1'):
        slab_det.fuse(after)
    # The quick start counts iterations, the schedule epochs.
    assert cfg.train_dataloader.sampler.type == 'InfiniteSampler'
    assert new_cfg.train_dataloader.sampler.type == 'DefaultSampler'
    assert new_cfg.train_cfg.max_epochs == 3 and new_cfg.load_from == str(out)
    assert [hook.type for hook in new_cfg.custom_hooks] == ['ProgressiveNormHook', 'RecalibrateFuseHook']


CLASSES, PALETTE = ('a', 'b', 'c', 'd'), [(1, 2, 3)] * 4


@pytest.mark.parametrize(
    ('meta', 'expected'),
    [
        (dict(CLASSES=CLASSES, PALETTE=PALETTE), dict(classes=CLASSES, palette=PALETTE)),
        (dict(dataset_meta=dict(classes=CLASSES, palette=PALETTE)), dict(classes=CLASSES, palette=PALETTE)),
    ],
)
def test_class_names_of_mmdet_2_and_3_survive(small_run_cfg, schedule, tmp_path, meta, expected):
    cfg = layernorm_run(small_run_cfg, None)
    torch.save(dict(meta=meta, state_dict=build_detector(cfg).state_dict()), tmp_path / 'random.pth')
    checkpoint, config, report = convert_detector(cfg, str(tmp_path / 'random.pth'), tmp_path / 'out.pth', schedule)
    norms = [m for m in build_detector(Config.fromfile(config), str(checkpoint)).modules() if isinstance(m, PRepBN)]
    assert norms and not any(norm.statistics_loaded for norm in norms), 'norm_eval must not freeze initial statistics'
    assert torch.load(checkpoint, weights_only=False)['meta']['dataset_meta'] == expected
    inferencer = DetInferencer(str(config), str(checkpoint), device='cpu', show_progress=False)
    assert tuple(inferencer.visualizer.dataset_meta['classes']) == expected['classes']


def tune(cfg, schedule, folder):
    """The config that tunes an absorbed twin of the detector."""
    cfg.dump(folder / 'fused_config.py')
    return Config.fromfile(write_tune_config(cfg, folder / 'fused_config.py', folder / 'fused.pth', 'a.pth', schedule))


def test_everything_but_the_schedule_stays_except_norm_and_ema_hooks(small_run_cfg, schedule, tmp_path):
    cfg = layernorm_run(small_run_cfg, None)
    stays = dict(type='NumClassCheckHook')
    cfg.custom_hooks = [stays, dict(type='EMAHook'), dict(type='mmengine.ProgressiveNormHook')]
    cfg.default_hooks.checkpoint.update(save_best='coco/bbox_mAP', max_keep_ckpts=7)
    result = tune(cfg, schedule, tmp_path)
    assert list(result.custom_hooks) == [stays, *schedule.custom_hooks]
    # A third of two iterations, rounded up.
    assert result.default_hooks.checkpoint == dict(cfg.default_hooks.checkpoint, interval=1)
    assert result.log_processor == cfg.log_processor and result.train_dataloader == cfg.train_dataloader
    assert result.load_from == str(tmp_path / 'fused.pth')


EPOCHS = dict(type='EpochBasedTrainLoop', max_epochs=3), dict(type='DefaultSampler', shuffle=True), 1
ITERATIONS = (
    dict(type='IterBasedTrainLoop', max_iters=500, val_interval=250),
    dict(type='InfiniteSampler', shuffle=True),
    167,
)


@pytest.mark.parametrize(('before', 'after'), [(EPOCHS, ITERATIONS), (ITERATIONS, EPOCHS)])
def test_everything_counts_as_the_schedule_does(small_run_cfg, tmp_path, before, after):
    by_epoch, (train_cfg, sampler, interval) = after is EPOCHS, after
    cfg = layernorm_run(small_run_cfg, None)
    cfg.train_cfg, cfg.train_dataloader.sampler, _ = before
    cfg.log_processor = dict(type='LogProcessor', window_size=7, by_epoch=before is EPOCHS)
    checkpoint = dict(type='CheckpointHook', save_best='auto', max_keep_ckpts=2)
    cfg.default_hooks.checkpoint = dict(interval=5000, by_epoch=before is EPOCHS, save_begin=24, **checkpoint)
    result = tune(cfg, Config(dict(train_cfg=train_cfg)), tmp_path)
    assert result.train_cfg == train_cfg and result.train_dataloader.sampler == sampler
    assert result.default_hooks.checkpoint == dict(interval=interval, by_epoch=by_epoch, **checkpoint)
    assert result.log_processor == dict(type='LogProcessor', window_size=7, by_epoch=by_epoch)


@pytest.mark.parametrize('given', [{}, dict(train_cfg=dict(type='IterBasedTrainLoop'))], ids=str)
def test_a_training_without_a_length_is_refused(small_run_cfg, tmp_path, given):
    cfg = layernorm_run(small_run_cfg, None)
    cfg.pop('train_cfg')
    cfg.update(given)
    message = 'neither the schedule nor the config of the detector has a train_cfg with max_epochs or max_iters'
    with pytest.raises(ConversionError, match=message):
        tune(cfg, Config(), tmp_path)
    assert not (tmp_path / 'fused_tune_config.py').exists()
