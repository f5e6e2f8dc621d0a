"""Averages of weights beside our hooks: what is validated and saved is the mean of what was trained."""

import pytest
import torch
from conftest import SMALL_SWIN
from mmdet.registry import MODELS
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from regression import train
from torch import nn

from slab_det.hooks import ExactResumeHook, NormStateHook, ProgressiveNormHook

NUM_ITERS = 6
MOMENTUM = 0.25


class Features(BaseModel):
    """Learns feature maps of pictures made of the points of a regression."""

    def __init__(self):
        super().__init__()
        self.backbone = MODELS.build(dict(SMALL_SWIN, type='mmdet.SLABSwin', depths=(1, 1, 1, 1), drop_path_rate=0.0))

    def forward(self, x, target, mode='tensor'):
        maps = self.backbone(nn.functional.interpolate(x[:, None].expand(-1, 3, -1, -1), size=(64, 64)))
        loss = sum((output - target.mean()).square().mean() for output in maps)
        return dict(loss=loss) if mode == 'loss' else [loss]


def copy_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class Watch(Hook):
    """Notes what each iteration trained, and what each validation has."""

    priority = 'LOWEST'

    def __init__(self):
        self.trained, self.validated = [], {}

    def before_train(self, runner):
        self.start = copy_state(runner.model)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.trained.append(copy_state(runner.model))

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.validated[runner.iter] = copy_state(runner.model)


def assert_equals(state, expected, keys):
    """Both in mmdet's order of channels, as state dicts have them."""
    keys = [key for key in keys if state[key].is_floating_point() and not key.endswith('_gamma')]
    assert any('downsample.reduction' in key for key in keys) and any('downsample.norm' in key for key in keys)
    # Parameters of another order, or ones that stood still, are off by more.
    different = [key for key in keys if not torch.allclose(state[key], expected[key], rtol=1e-4, atol=1e-6)]
    assert not different, f'{len(different)} of {len(keys)} are not the mean: {different}'


@pytest.mark.parametrize(
    'options',
    [
        dict(momentum=MOMENTUM),
        dict(momentum=MOMENTUM, update_buffers=True, begin_iter=4),
        dict(ema_type='StochasticWeightAverage', update_buffers=True),
    ],
    ids=str,
)
def test_validated_and_saved_weights_are_the_average_of_the_trained_ones(tmp_path, options):
    watch = Watch()
    hooks = [EMAHook(**options), ProgressiveNormHook(), NormStateHook(), ExactResumeHook(), watch]
    runner = train(tmp_path, hooks, Features, max_iters=NUM_ITERS, val=True)
    begin, mean = options.get('begin_iter', 0), None
    keys = watch.start.keys() if options.get('update_buffers') else dict(runner.model.named_parameters()).keys()
    assert list(watch.validated) == [2, 4, 6]
    for iteration, trained in enumerate(watch.trained, start=1):
        updates = iteration - max(begin, 1)
        if updates <= 0:
            mean = trained
        else:
            share = 1 / (updates + 1) if options.get('ema_type') else MOMENTUM
            mean = {key: value + share * (trained[key] - value) for key, value in mean.items()}
        saved = torch.load(tmp_path / f'iter_{iteration}.pth', weights_only=False)
        assert_equals(saved['state_dict'], mean, keys)
        assert_equals({k.removeprefix('module.'): v for k, v in saved['ema_state_dict'].items()}, trained, keys)
        if iteration in watch.validated:
            assert_equals(watch.validated[iteration], mean, keys)
    # Nothing of it leaks into the training.
    assert any(not torch.allclose(mean[key], watch.trained[-1][key]) for key in keys)
