"""The config that trains an absorbed detector towards its teacher; test_distill.py runs it."""

import pytest
from mmengine.config import Config

from slab_det.conversion import ConversionError, write_tune_config


def layernorm_run(small_run_cfg):
    cfg = small_run_cfg('layernorm', max_iters=2, norm_cfg=dict(type='LN'))
    cfg.custom_hooks = []
    return cfg


@pytest.fixture
def schedule():
    """A schedule as a user would write it in a file."""
    hooks = [dict(type='ProgressiveNormHook', total=0.5), dict(type='RecalibrateFuseHook', num_images=4, max_passes=2)]
    return Config(dict(train_cfg=dict(type='IterBasedTrainLoop', max_iters=2), custom_hooks=hooks))


def tune(cfg, schedule, folder):
    """The config that tunes an absorbed twin of the detector."""
    cfg.dump(folder / 'fused_config.py')
    return Config.fromfile(write_tune_config(cfg, folder / 'fused_config.py', folder / 'fused.pth', 'a.pth', schedule))


def test_everything_but_the_schedule_stays_except_norm_and_ema_hooks(small_run_cfg, schedule, tmp_path):
    cfg = layernorm_run(small_run_cfg)
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
    cfg = layernorm_run(small_run_cfg)
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
    cfg = layernorm_run(small_run_cfg)
    cfg.pop('train_cfg')
    cfg.update(given)
    message = 'neither the schedule nor the config of the detector has a train_cfg with max_epochs or max_iters'
    with pytest.raises(ConversionError, match=message):
        tune(cfg, Config(), tmp_path)
    assert not (tmp_path / 'fused_tune_config.py').exists()
