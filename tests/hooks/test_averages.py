"""With our hooks, averaged weights that are validated and saved equal the mean of the trained weights."""

import pytest
import torch
from conftest import SMALL_SWIN
from mmdet.engine.hooks import MeanTeacherHook
from mmdet.registry import MODELS
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from regression import train
from torch import nn

from slab_det.common.errors import SlabDetError
from slab_det.hooks import ExactResumeHook, NormStateHook, ProgressiveNormHook
from slab_det.norms import named_progressive_norms

NUM_ITERS = 6
MOMENTUM = 0.25


class Features(BaseModel):
    """Learns feature maps of images that are made from regression points."""

    def __init__(self):
        super().__init__()
        self.backbone = MODELS.build(dict(SMALL_SWIN, type='mmdet.SLABSwin', depths=(1, 1, 1, 1), drop_path_rate=0.0))

    def forward(self, x, target, mode='tensor'):
        maps = self.backbone(nn.functional.interpolate(x[:, None].expand(-1, 3, -1, -1), size=(64, 64)))
        loss = sum((output - target.mean()).square().mean() for output in maps)
        return dict(loss=loss) if mode == 'loss' else [loss]


class MeanTeacher(BaseModel):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Features(), Features().requires_grad_(False)

    def forward(self, *args, **kwargs):
        return self.student(*args, **kwargs)


def copy_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class Watch(Hook):
    """Records the weights after each iteration and at each validation."""

    priority = 'LOWEST'

    def __init__(self):
        self.trained, self.validated = [], {}

    def before_train(self, runner):
        self.start = copy_state(runner.model)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.trained.append(copy_state(runner.model))

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.validated[runner.iter] = copy_state(runner.model)


def run(tmp_path, average, model, **options):
    watch = Watch()
    ours = [ProgressiveNormHook(), NormStateHook(), ExactResumeHook()]
    runner = train(tmp_path, [average, *ours, watch], model, max_iters=NUM_ITERS, **options)
    return runner, watch


def assert_equals(state, expected, keys):
    """Both in mmdet's order of channels, as state dicts have them."""
    keys = [key for key in keys if state[key].is_floating_point() and not key.endswith('_gamma')]
    assert any('downsample.reduction' in key for key in keys) and any('downsample.norm' in key for key in keys)
    # Parameters in another channel order, or that were never trained, differ by more.
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
    runner, watch = run(tmp_path, EMAHook(**options), Features, val=True)
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
    # The average does not leak into the training.
    assert any(not torch.allclose(mean[key], watch.trained[-1][key]) for key in keys)


def test_a_mean_teacher_is_the_average_of_its_student(tmp_path):
    runner, watch = run(tmp_path, MeanTeacherHook(momentum=MOMENTUM, skip_buffer=False), MeanTeacher)

    def part(state, name):
        return {key.removeprefix(f'{name}.'): value for key, value in state.items() if key.startswith(f'{name}.')}

    # The teacher begins as its student.
    mean = part(watch.start, 'student')
    for trained in watch.trained:
        mean = {key: value + MOMENTUM * (part(trained, 'student')[key] - value) for key, value in mean.items()}
    assert_equals(part(runner.model.state_dict(), 'teacher'), mean, mean.keys())
    norms = named_progressive_norms(runner.model)
    assert norms and {(norm.gamma, norm._gamma.item()) for norm in norms.values()} == {(0.0, 0.0)}


def test_a_mean_teacher_without_averaged_statistics_is_refused(tmp_path):
    with pytest.raises(SlabDetError, match=r'teacher\.backbone.*skip_buffer=False'):
        run(tmp_path, MeanTeacherHook(momentum=MOMENTUM), MeanTeacher)
