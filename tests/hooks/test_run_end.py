"""The end of a run: refused before the first iteration where it cannot be done, and about the run's own weights."""

from pathlib import Path

import pytest
import torch
from conftest import differing
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.fileio import put
from mmengine.hooks import Hook
from mmengine.runner import Runner

import slab_det
from slab_det.backbones import SLABSwin
from slab_det.common.errors import CheckpointError, SlabDetError
from slab_det.hooks import recalibrate_fuse

FUSE = dict(type='RecalibrateFuseHook', num_images=4, max_passes=2)


def without_config(cfg):
    """A runner of parts, as mmengine's tutorials build it."""
    parts = ('train_dataloader', 'train_cfg', 'optim_wrapper', 'work_dir', 'custom_hooks', 'experiment_name')
    return Runner(MODELS.build(cfg.model), **{name: cfg[name] for name in parts}, default_scope='mmdet')


def with_own_model(cfg):
    """The config's LayerNorm detector, converted and given as an object."""
    cfg.model.backbone.norm_cfg = dict(type='LN')
    model = slab_det.convert_norms(MODELS.build(cfg.model), dict(type='TokenBN'))
    arguments = {name: value for name, value in cfg.items() if name in Runner.__init__.__code__.co_varnames}
    return Runner(**{**arguments, 'model': model}, cfg=cfg)


def semi_supervised(cfg):
    detector = cfg.model
    preprocessor = dict(type='MultiBranchDataPreprocessor', data_preprocessor=detector.pop('data_preprocessor'))
    branches = dict(semi_train_cfg=dict(freeze_teacher=True), semi_test_cfg=dict(predict_on='teacher'))
    cfg.model = dict(type='SoftTeacher', detector=detector, data_preprocessor=preprocessor, **branches)
    return Runner.from_cfg(cfg)


def with_layer_norm(cfg):
    cfg.model.backbone.update(norm_cfg=dict(type='LN'), attention='softmax')
    return Runner.from_cfg(cfg)


def without_test_pipeline(cfg):
    cfg.custom_hooks[0].pipeline = 'test'
    for split in ('val', 'test'):
        for part in ('cfg', 'dataloader', 'evaluator'):
            cfg.pop(f'{split}_{part}')
    return Runner.from_cfg(cfg)


def with_a_watched_norm(cfg):
    cfg.model.backbone.type = Watched
    return Runner.from_cfg(cfg)


class Watched(SLABSwin):
    """A backbone of a user, who looks at the outputs of a norm."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm1.register_forward_hook(lambda module, inputs, output: None)


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (without_config, r'no model and no train_dataloader: give Runner\(cfg='),
        (with_own_model, r'\d+ weights differ \(backbone\..*Name the norms in the config'),
        (semi_supervised, r'SoftTeacher.*custom_hooks.*take model\.teacher'),
        (
            with_layer_norm,
            'remove the hook from custom_hooks; .*slab-det absorb',
        ),
        (without_test_pipeline, 'add a test_dataloader'),
        (with_a_watched_norm, r'backbone\.norm1: it has hooks'),
    ],
    ids=lambda value: getattr(value, '__name__', ''),
)
def test_a_run_whose_end_cannot_be_done_does_not_begin(small_run_cfg, build, message):
    cfg = small_run_cfg(max_iters=2, norm_cfg=dict(type='TokenBN'))
    cfg.custom_hooks = [dict(FUSE)]
    runner = build(cfg)
    with pytest.raises(SlabDetError, match=message):
        runner.train()
    assert runner.iter == 0 and not list(Path(cfg.work_dir).glob('*.pth'))


def test_the_check_before_a_run_changes_no_random_number(small_run_cfg):
    """Or a resumed run would not end as an uninterrupted one."""
    drawn = []

    class Draw(Hook):
        priority = 'LOWEST'

        def before_train(self, runner):
            drawn.append(torch.rand(3))
            raise KeyboardInterrupt

    for number, hooks in enumerate(([], [dict(FUSE)])):
        cfg = small_run_cfg(str(number), norm_cfg=dict(type='TokenBN'))
        cfg.custom_hooks = hooks
        runner = Runner.from_cfg(cfg)
        runner.register_hook(Draw())
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    assert torch.equal(*drawn)


@pytest.fixture
def shared_run_cfg(small_run_cfg):
    """A function: the config of a short run in a folder that all such runs share."""

    def build(name):
        cfg = small_run_cfg('shared', max_iters=2, norm_cfg=dict(type='TokenBN'))
        cfg.custom_hooks, cfg.experiment_name, cfg.randomness = [dict(FUSE)], name, dict(seed=ord(name[0]))
        # No validation: nothing looks at AP here.
        for part in ('cfg', 'dataloader', 'evaluator'):
            cfg[f'val_{part}'] = None
        return cfg

    return build


def test_a_checkpoint_that_is_replaced_during_recalibration_is_not_overwritten(shared_run_cfg, monkeypatch):
    runner = Runner.from_cfg(shared_run_cfg('first'))
    last = Path(runner.work_dir) / 'iter_2.pth'
    recalibrate = recalibrate_fuse.recalibrate

    def replace_meanwhile(*args, **kwargs):
        put(b'of another run', last)
        return recalibrate(*args, **kwargs)

    monkeypatch.setattr(recalibrate_fuse, 'recalibrate', replace_meanwhile)
    with pytest.raises(CheckpointError, match='is of another run'):
        runner.train()
    assert last.read_bytes() == b'of another run' and not (last.parent / 'fused.pth').exists()
    (own,) = last.parent.glob('iter_2_*.pth')
    assert not differing(torch.load(own, weights_only=False)['state_dict'], runner.model)
    # --resume alone would take the file of the other run.
    assert 'the same command with --resume recalibrates' not in next(last.parent.glob('*/*.log')).read_text()


def test_a_run_does_not_fuse_the_weights_of_another_run_in_its_folder(shared_run_cfg):
    class OtherRun(Hook):
        """Another run saves the last iteration in the same folder, after the first has saved it."""

        priority = 'LOW'

        def after_train(self, runner):
            other.train()

    first, other = (Runner.from_cfg(shared_run_cfg(name)) for name in ('first', 'other'))
    first.register_hook(OtherRun())
    with pytest.raises(CheckpointError, match='is of another run') as error:
        first.train()
    folder = Path(first.work_dir)
    (own,) = folder.glob('iter_2_*.pth')
    assert str(own) in str(error.value)
    # The other run has its results; the first one's weights are not lost, and fused as the message says.
    weight = 'backbone.stages.0.blocks.0.ffn.layers.1.weight'
    cfg = shared_run_cfg('resumed')
    cfg.work_dir, cfg.resume, cfg.load_from = str(folder / 'own'), True, str(own)
    Runner.from_cfg(cfg).train()
    for runner, fused in ((other, folder / 'fused.pth'), (first, folder / 'own/fused.pth')):
        state = torch.load(fused, weights_only=False)['state_dict']
        assert torch.equal(state[weight], runner.model.state_dict()[weight])
    assert differing(first.model, other.model)
    assert Config.fromfile(folder / 'own/fused_config.py').model.type == 'mmdet.FusedDetector'
