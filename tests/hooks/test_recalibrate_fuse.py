"""RecalibrateFuseHook in real runs of a small Mask R-CNN on generated images."""

from pathlib import Path

import pytest
import torch
from conftest import differing
from mmdet.apis import DetInferencer
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.common.errors import CheckpointError
from slab_det.fusion import FusionError
from slab_det.measure.report_file import ap_from_metrics, read_report
from slab_det.norms import named_offline_norms
from slab_det.recalibration import RecalibrationError, recalibration_dataloader


def load(path):
    return torch.load(path, weights_only=False)


def train(cfg):
    """Trains, and returns the runner and the work directory."""
    runner = Runner.from_cfg(cfg)
    runner.train()
    return runner, Path(cfg.work_dir)


@pytest.fixture(scope='module')
def finished_run(module_run_cfg):
    cfg = module_run_cfg('finished')
    # The augmentation tells images of the training from images of inference.
    cfg.train_dataloader.dataset.pipeline.insert(2, dict(type='RandomResize', scale=(96, 80), ratio_range=(0.5, 1.5)))
    return train(cfg)


def test_a_run_leaves_a_recalibrated_checkpoint_a_fused_twin_and_a_report(finished_run):
    runner, work_dir = finished_run
    last = load(work_dir / 'iter_6.pth')
    assert {'optimizer', 'param_schedulers', 'message_hub', 'slab_det'} <= last.keys() and last['meta']['iter'] == 6
    assert not differing(last['state_dict'], runner.model)
    assert last['meta'].keys() == load(work_dir / 'iter_4.pth')['meta'].keys()

    # Statistics are no longer the running average: a second recalibration finds the same ones.
    model = build_detector(runner.cfg, str(work_dir / 'iter_6.pth'))
    for pipeline in ('test', 'train'):
        loader = recalibration_dataloader(runner.cfg, 6, pipeline)
        slab_det.recalibrate(model, loader, max_passes=3, progress=False)
        if pipeline == 'test':
            assert differing(model, last['state_dict'])
    assert not differing(model, last['state_dict'])

    fused = load(work_dir / 'fused.pth')
    assert fused['meta']['fused']
    assert fused['meta']['dataset_meta']['classes'] == runner.train_dataloader.dataset.metainfo['classes']
    assert not differing(fused['state_dict'], slab_det.fuse(model))

    unfused_entry, fused_entry = read_report(work_dir / 'report.json')
    assert unfused_entry.recalibration['num_batches'] == 3 and unfused_entry.recalibration['passes'] == 3
    assert unfused_entry.recalibration['pipeline'] == 'train'
    assert fused_entry.fusion['folded'] == len(list(named_offline_norms(model)))
    assert 0 < fused_entry.fusion['difference']['float64'] < 1e-9
    # The report holds the AP of the recalibrated model.
    test_cfg = runner.cfg.copy()
    test_cfg.load_from, test_cfg.experiment_name = str(work_dir / 'iter_6.pth'), 'test-recalibrated'
    assert ap_from_metrics(Runner.from_cfg(test_cfg).test()) == unfused_entry.ap


def test_fused_config_loads_everywhere(finished_run, tmp_path):
    runner, work_dir = finished_run
    config, checkpoint = str(work_dir / 'fused_config.py'), str(work_dir / 'fused.pth')
    cfg = Config.fromfile(config)
    assert cfg.model.type == 'mmdet.FusedDetector' and 'custom_hooks' not in cfg
    cfg.work_dir, cfg.load_from, cfg.experiment_name = str(tmp_path), checkpoint, 'test-fused'
    tester = Runner.from_cfg(cfg)
    tester.test()
    state = load(checkpoint)['state_dict']
    with pytest.raises(CheckpointError, match='fused'):
        DetInferencer(str(work_dir / 'quickstart_mask_rcnn_slab_swin.py'), checkpoint, device='cpu')
    assert not differing(tester.model, state)
    image = runner.val_dataloader.dataset.get_data_info(0)['img_path']
    inferencer = DetInferencer(config, checkpoint, device='cpu', show_progress=False)
    assert len(inferencer(image)['predictions']) == 1
    assert not differing(inferencer.model, state)
    assert inferencer.model.dataset_meta['classes'] == runner.train_dataloader.dataset.metainfo['classes']


def test_an_epoch_based_run_serves_averaged_weights_and_best_checkpoints_keep_their_gamma(small_run_cfg):
    cfg = small_run_cfg()
    cfg.train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=2, val_interval=1)
    cfg.train_dataloader.sampler = dict(type='DefaultSampler', shuffle=True)
    # Every validation has AP 0, so the first one, at gamma 0.5, stays the best.
    cfg.default_hooks.checkpoint.update(by_epoch=True, interval=1, save_best='coco/bbox_mAP', rule='greater')
    cfg.log_processor.by_epoch = True
    cfg.custom_hooks[0].update(total=2, unit='epoch')
    cfg.custom_hooks[1].update(pipeline='test', num_images=5)
    # RTMDet's own.
    ema = dict(type='EMAHook', ema_type='ExpMomentumEMA', momentum=0.0002, update_buffers=True, priority=49)
    cfg.custom_hooks.append(ema)
    runner, work_dir = train(cfg)
    last = load(work_dir / 'epoch_2.pth')
    entry = read_report(work_dir / 'report.json')[0]
    assert last['meta']['epoch'] == 2 and entry.training['iterations'] == 10
    assert entry.recalibration['pipeline'] == 'test' and entry.recalibration['num_batches'] == 5
    model = build_detector(runner.cfg, str(work_dir / 'epoch_2.pth'))
    slab_det.recalibrate(model, recalibration_dataloader(runner.cfg, 5, 'test'), max_passes=3, progress=False)
    assert not differing(model, last['state_dict'])

    source = {key.removeprefix('module.'): value for key, value in last['ema_state_dict'].items()}
    weight = 'backbone.stages.0.blocks.0.ffn.layers.1.weight'
    assert torch.equal(runner.model.state_dict()[weight], source[weight])
    assert not torch.equal(last['state_dict'][weight], source[weight])
    # fc2 takes no norm: the fused model has it as it is in the served state dict.
    assert torch.equal(load(work_dir / 'fused.pth')['state_dict'][weight], last['state_dict'][weight])

    (best,) = work_dir.glob('best_*.pth')
    assert load(best)['state_dict']['backbone.norm0._gamma'].item() == 0.5
    with pytest.raises(FusionError, match='gamma = 0.5'):
        slab_det.fuse(build_detector(cfg, str(best)))


def test_a_run_that_ends_with_gamma_above_0_keeps_its_checkpoint_and_is_not_fused(small_run_cfg):
    cfg = small_run_cfg(max_iters=2)
    cfg.custom_hooks[0].update(total=10, unit='iter')
    _, work_dir = train(cfg)
    assert load(work_dir / 'iter_2.pth')['state_dict']['backbone.norm0._gamma'].item() == 0.8
    assert not (work_dir / 'fused.pth').exists()
    log = next(work_dir.glob('*/*.log')).read_text()
    assert 'The run ended with gamma = 0.8' in log and 'nothing was recalibrated or fused' in log
    assert 'Lower `total`' in log
    before, _, _ = log.partition('Saving checkpoint')
    assert 'this run ends before gamma is 0' in before


def test_nan_statistics_stop_recalibration_and_keep_the_checkpoint(small_run_cfg):
    class Damage(Hook):
        priority = 'LOW'

        def after_train(self, runner):
            path = Path(runner.work_dir) / 'iter_2.pth'
            checkpoint = load(path)
            checkpoint['state_dict']['backbone.stages.1.downsample.reduction.weight'][0, 0] = float('nan')
            torch.save(checkpoint, path)
            self.content = path.read_bytes()

    cfg = small_run_cfg(max_iters=2)
    damage = Damage()
    runner = Runner.from_cfg(cfg)
    runner.register_hook(damage)
    with pytest.raises(RecalibrationError, match=r'backbone\.stages\.2\.blocks\.0\.norm1: .*NaN'):
        runner.train()
    assert (Path(cfg.work_dir) / 'iter_2.pth').read_bytes() == damage.content
    assert not (Path(cfg.work_dir) / 'fused.pth').exists()
    log = next(Path(cfg.work_dir).glob('*/*.log')).read_text()
    assert 'the same command with --resume' in log and 'recalibrates and fuses' in log


def test_official_recipe_keeps_loaded_statistics_and_its_output_norms(small_run_cfg):
    cfg = small_run_cfg(max_iters=2, out_norm_cfg=dict(type='LN'), norm_eval=True)
    pretrained = build_detector(small_run_cfg())
    slab_det.set_gamma(pretrained, 0.0)
    for _, norm in named_offline_norms(pretrained):
        norm.set_statistics(torch.randn(norm.num_features), torch.rand(norm.num_features) + 0.5)
    backbone = {
        key.removeprefix('backbone.'): value
        for key, value in pretrained.state_dict().items()
        if key.startswith('backbone.') and not key.startswith('backbone.norm')
    }
    Path(cfg.work_dir).mkdir(parents=True)
    path = Path(cfg.work_dir) / 'pretrained.pth'
    torch.save(dict(state_dict=backbone), path)
    cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(path))
    cfg.custom_hooks = [
        dict(type='ProgressiveNormHook', total=0),
        dict(type='RecalibrateFuseHook', recalibrate=False, num_images=2),
    ]
    _, work_dir = train(cfg)
    state = load(work_dir / 'iter_2.pth')['state_dict']
    statistics = [key for key in backbone if key.endswith(('running_mean', 'running_var'))]
    assert statistics and not [key for key in statistics if not torch.equal(state[f'backbone.{key}'], backbone[key])]
    fused_entry = read_report(work_dir / 'report.json')[1]
    assert fused_entry.fusion['kept'] == 4 and fused_entry.recalibration is None
