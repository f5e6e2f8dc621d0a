"""ProgressiveNormHook: gamma follows its schedule in real runs, whatever interrupts or resumes them."""

import math

import pytest
import torch
from conftest import differing
from mmengine.hooks import EarlyStoppingHook, EMAHook, Hook
from mmengine.runner import Runner
from regression import Regression, train

import slab_det
from slab_det.common.errors import SlabDetError
from slab_det.hooks import ProgressiveNormHook
from slab_det.norms import UN, PRepBN
from slab_det.norms.base import read_number

NUM_ITERS = 10


class Recorder(Hook):
    priority = 'VERY_LOW'

    def __init__(self):
        self.ran_with, self.logged, self.validated_with = [], [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.ran_with.append(runner.model.norms[0].gamma)
        self.logged.append(runner.message_hub.get_scalar('train/gamma').current())

    def before_val_epoch(self, runner):
        self.validated_with.append(runner.model.norms[0].gamma)


def run(work_dir, hook=None, hooks=(), **options):
    """Trains, and returns the model and the recorder."""
    recorder = Recorder()
    return train(work_dir, [hook or ProgressiveNormHook(), recorder, *hooks], **options).model, recorder


def default_gammas(start=1.0):
    return pytest.approx([start * max(0, 1 - t / 8) for t in range(NUM_ITERS)], abs=1e-12)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A run without interruption, with default arguments."""
    folder = tmp_path_factory.mktemp('whole')
    return folder, *run(folder)


@pytest.mark.parametrize(
    'hook, expected',
    [
        (dict(total=1.0), lambda t: 1 - t / 10),
        (dict(), lambda t: max(0, 1 - t / 8)),
        (dict(total=5, unit='iter'), lambda t: max(0, 1 - t / 5)),
        (dict(total=2, unit='epoch'), lambda t: max(0, 1 - t / 4)),
        (dict(total=0), lambda t: 0),
        (dict(decay='cosine', total=1.0), lambda t: (1 + math.cos(math.pi * t / 10)) / 2),
        (dict(decay='step', total=1.0), lambda t: 1 - math.floor(4 * t / 10) / 4),
    ],
)
def test_iteration_t_runs_with_gamma_of_t_and_the_end_stores_gamma_of_T(tmp_path, hook, expected):
    model, recorder = run(tmp_path, hook=ProgressiveNormHook(**hook))
    assert recorder.ran_with == pytest.approx([expected(t) for t in range(NUM_ITERS)], abs=1e-12)
    assert recorder.logged == recorder.ran_with
    assert [norm.gamma for norm in model.norms] == [0.0, 0.0]
    for t in (3, NUM_ITERS):
        saved = torch.load(tmp_path / f'iter_{t}.pth', weights_only=False)['state_dict']['norms.1._gamma']
        assert saved.item() == pytest.approx(expected(t), abs=1e-12)


def test_validation_accumulation_and_activation_checkpointing_count_no_iteration(whole, tmp_path):
    checkpointed, recorder = run(tmp_path / 'checkpointed', model=lambda: Regression(with_cp=True))
    assert recorder.ran_with == default_gammas() and not differing(checkpointed, whole[1])
    validated, recorder = run(tmp_path / 'validated', val=True)
    assert recorder.ran_with == default_gammas() and not differing(validated, whole[1])
    # After every other iteration.
    assert recorder.validated_with == pytest.approx([0.75, 0.5, 0.25, 0, 0], abs=1e-12)
    accumulated, recorder = run(tmp_path / 'accumulated', accumulate=2)
    assert recorder.ran_with == default_gammas()
    # The first norm's input depends on no weight, so accumulation must not change its statistics.
    changed = differing(accumulated, whole[1])
    assert changed and not [key for key in changed if key.startswith('norms.0.repbn.running')]


@pytest.mark.parametrize('start', [0.0, 0.6])
def test_decay_starts_from_the_gamma_of_loaded_weights(tmp_path, start):
    torch.manual_seed(1)
    model = Regression()
    slab_det.set_gamma(model, start)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'pretrained.pth')
    _, recorder = run(tmp_path / 'run', load_from=str(tmp_path / 'pretrained.pth'))
    assert recorder.ran_with == default_gammas(start)


@pytest.mark.parametrize(('start', 'told'), [(1.0, True), (0.0, False)])
def test_a_run_that_may_stop_early_says_that_gamma_may_stay(tmp_path, start, told):
    model, stop = Regression(), EarlyStoppingHook('accuracy')
    slab_det.set_gamma(model, start)
    # This run has no validation.
    stop.before_run = lambda runner: None
    run(tmp_path, hooks=[stop], model=lambda: model)
    (log,) = tmp_path.glob('*/*.log')
    assert ('EarlyStoppingHook may end this run before iteration 8' in log.read_text()) == told


def test_prolonging_a_finished_run_does_not_raise_gamma(tmp_path):
    run(tmp_path)
    _, recorder = run(tmp_path, resume=True, max_iters=2 * NUM_ITERS)
    assert recorder.ran_with == [0.0] * NUM_ITERS


RTMDET_EMA = dict(ema_type='mmdet.ExpMomentumEMA', momentum=0.0002, update_buffers=True)


@pytest.mark.parametrize('priority', [49, 'LOW'])
@pytest.mark.parametrize('average', [dict(momentum=0.1, update_buffers=True), RTMDET_EMA], ids=str)
def test_averaged_weights_carry_the_runners_gamma(tmp_path, average, priority):
    """EMAHook swaps weights and average by ``.data``; no number may be stale afterwards."""
    ema = EMAHook(**average)
    ema.priority = priority
    model, recorder = run(tmp_path, hooks=[ema], val=True)
    # After every other iteration, the last included: the gamma that the checkpoint of the same iteration holds.
    assert recorder.validated_with == pytest.approx([0.75, 0.5, 0.25, 0, 0], abs=1e-12)
    for t, gamma in ((4, 0.5), (NUM_ITERS, 0.0)):
        saved = torch.load(tmp_path / f'iter_{t}.pth', weights_only=False)
        assert saved['state_dict']['norms.0._gamma'].item() == gamma
        assert saved['ema_state_dict']['module.norms.0._gamma'].item() == gamma
    assert [norm.gamma for norm in (*model.norms, *ema.ema_model.module.norms)] == [0.0] * 4
    assert 'The run ended with gamma' not in next(tmp_path.glob('*/*.log')).read_text()
    # The last validation leaves the numbers of forward as they are.
    model.train()
    inputs = torch.randn(2, 5, 4)
    assert torch.equal(model.norms[0](inputs), model.norms[0].repbn(inputs))


class CountReads(Hook):
    """Counts the numbers that norms read from their device from one iteration to the next."""

    priority = 'HIGHEST'

    def __init__(self, monkeypatch):
        self.reads, read = [0], read_number

        def count(tensor, default):
            self.reads[-1] += 1
            return read(tensor, default)

        for module in ('base', 'progressive', 'quadratic'):
            monkeypatch.setattr(f'slab_det.norms.{module}.read_number', count)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.reads.append(0)


@pytest.mark.parametrize('norm', [PRepBN, UN])
def test_no_iteration_waits_for_the_device_to_read_a_number(tmp_path, monkeypatch, norm):
    """mmengine calls ``train()`` in each iteration."""
    count = CountReads(monkeypatch)
    hooks = [count] if norm is UN else [count, ProgressiveNormHook()]
    train(tmp_path, hooks, lambda: Regression(norm), max_iters=4, interval=9)
    before, *iterations = count.reads
    assert before == 0 or norm is PRepBN, 'the hook reads gamma once'
    assert iterations == [0] * 4


@pytest.mark.parametrize('gamma, loaded, refused', [(1.0, False, True), (1.0, True, False), (0.0, False, False)])
def test_a_frozen_layernorm_is_not_replaced_by_what_never_trained(small_run_cfg, gamma, loaded, refused):
    runner = Runner.from_cfg(small_run_cfg(max_iters=1, frozen_stages=1))
    for norm in runner.model.modules():
        if isinstance(norm, PRepBN):
            norm.gamma, norm.statistics_loaded = gamma, loaded
    hook = next(hook for hook in runner.hooks if isinstance(hook, ProgressiveNormHook))
    runner.train_loop  # noqa: B018 (builds it)
    if refused:
        with pytest.raises(SlabDetError, match=r'backbone.*frozen_stages=-1'):
            hook.before_train(runner)
    else:
        hook.before_train(runner)
