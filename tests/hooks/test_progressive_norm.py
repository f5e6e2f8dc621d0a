import logging
import math

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import slab_det
from slab_det.hooks import ProgressiveNormHook
from slab_det.norms import PRepBN
from slab_det.runtime.errors import SlabDetError

NUM_ITERS = 10


class Points(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(5, 4, generator=generator) * 3 + 1, torch.randn(5, 2, generator=generator)


class Regression(BaseModel):
    """Two norms between linear layers, one of them recomputed in the backward pass if asked."""

    def __init__(self, with_cp=False):
        super().__init__()
        self.norms = nn.ModuleList(PRepBN(4) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.with_cp = with_cp
        self.gammas_in_eval = []

    def forward(self, x, target, mode='tensor'):
        for norm, linear in zip(self.norms, self.linears, strict=True):

            def block(x, norm=norm, linear=linear):
                return x + linear(norm(x)).relu()

            x = checkpoint(block, x, use_reentrant=False) if self.with_cp and self.training else block(x)
        if not self.training:
            self.gammas_in_eval.append(self.norms[0].gamma)
        loss = (self.head(x) - target).square().mean()
        return dict(loss=loss) if mode == 'loss' else [loss]


class Recorder(Hook):
    priority = 'VERY_LOW'

    def __init__(self, stop_after=None):
        self.ran_with, self.logged, self.stop_after = [], [], stop_after

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.ran_with.append(runner.model.norms[0].gamma)
        self.logged.append(runner.message_hub.get_scalar('train/gamma').current())

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.stop_after:
            raise KeyboardInterrupt


def run(
    work_dir,
    model=None,
    resume=False,
    stop_after=None,
    val=False,
    accumulate=1,
    load_from=None,
    hook=None,
    max_iters=NUM_ITERS,
    custom_hooks=(),
    recorder=None,
):
    torch.manual_seed(3)
    model = model or Regression()
    recorder = recorder or Recorder(stop_after)
    loader = dict(dataset=Points(), batch_size=4, num_workers=0, collate_fn=dict(type='default_collate'))
    runner = Runner(
        model,
        str(work_dir),
        train_dataloader=dict(**loader, sampler=dict(type='InfiniteSampler', seed=0)),
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=2 if val else max_iters + 1),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.01), accumulative_counts=accumulate),
        val_dataloader=dict(**loader, sampler=dict(type='DefaultSampler', shuffle=False)) if val else None,
        val_cfg={} if val else None,
        val_evaluator=dict(type='DumpResults', out_file_path=f'{work_dir}/out.pkl') if val else None,
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=False)),
        custom_hooks=[hook or ProgressiveNormHook(), recorder, *custom_hooks],
        resume=resume,
        load_from=load_from,
        experiment_name=f'{work_dir.name}-{resume}',
        randomness=dict(seed=0),
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        pass
    return runner, recorder


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
    runner, recorder = run(tmp_path, hook=ProgressiveNormHook(**hook))
    assert recorder.ran_with == pytest.approx([expected(t) for t in range(NUM_ITERS)], abs=1e-12)
    assert recorder.logged == recorder.ran_with
    assert [norm.gamma for norm in runner.model.norms] == [0.0, 0.0]
    for t in (3, NUM_ITERS):
        saved = torch.load(tmp_path / f'iter_{t}.pth', weights_only=False)['state_dict']['norms.1._gamma']
        assert saved.item() == pytest.approx(expected(t), abs=1e-12)


@pytest.mark.parametrize('stop_after', [1, 4, 9])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, stop_after):
    whole, _ = run(tmp_path / 'whole')
    run(tmp_path / 'parts', stop_after=stop_after)
    resumed, recorder = run(tmp_path / 'parts', resume=True)
    assert recorder.ran_with[0] == pytest.approx(max(0, 1 - (NUM_ITERS - len(recorder.ran_with)) / 8), abs=1e-12)
    # norm_eval would freeze norms whose statistics count as loaded: those of this run are its own.
    assert not any(norm.statistics_loaded for norm in resumed.model.norms)
    for key, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], value), key


def test_validation_sees_the_mixture_of_its_time_and_changes_nothing(tmp_path):
    without, _ = run(tmp_path / 'without')
    torch.manual_seed(3)
    model = Regression()
    with_val, _ = run(tmp_path / 'with', model=model, val=True)
    for key, value in without.model.state_dict().items():
        assert torch.equal(with_val.model.state_dict()[key], value), key
    assert model.gammas_in_eval[::2] == pytest.approx([max(0, 1 - t / 8) for t in (2, 4, 6, 8, 10)], abs=1e-12)


def test_gradient_accumulation_and_activation_checkpointing_leave_gamma_and_statistics_as_without(tmp_path):
    def final(name, **options):
        torch.manual_seed(3)
        model = Regression(with_cp=options.pop('with_cp', False))
        _, recorder = run(tmp_path / name, model=model, **options)
        return recorder.ran_with, model.state_dict()

    plain_gammas, plain = final('plain')
    gammas, recomputed = final('checkpointing', with_cp=True)
    assert gammas == plain_gammas
    for key, value in plain.items():
        assert torch.equal(recomputed[key], value), key
    gammas, validated = final('validation', val=True)
    assert gammas == plain_gammas
    for key, value in plain.items():
        assert torch.equal(validated[key], value), key
    gammas, accumulated = final('accumulation', accumulate=2)
    assert gammas == plain_gammas
    # The first norm's input depends on no weight: its statistics see every iteration once, whoever steps when.
    for buffer in ('running_mean', 'running_var'):
        assert torch.equal(accumulated[f'norms.0.repbn.{buffer}'], plain[f'norms.0.repbn.{buffer}'])


@pytest.mark.parametrize('start', [0.0, 0.6])
def test_decay_starts_from_the_gamma_of_loaded_weights_and_never_raises_it(tmp_path, start):
    torch.manual_seed(1)
    model = Regression()
    slab_det.set_gamma(model, start)
    tmp_path.joinpath('weights').mkdir()
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'weights' / 'pretrained.pth')
    _, recorder = run(tmp_path / 'run', load_from=str(tmp_path / 'weights' / 'pretrained.pth'))
    assert recorder.ran_with == pytest.approx([start * max(0, 1 - t / 8) for t in range(NUM_ITERS)], abs=1e-12)


def test_resuming_keeps_the_start_that_the_run_had(tmp_path):
    model = Regression()
    slab_det.set_gamma(model, 0.6)
    run(tmp_path, model=model, stop_after=5)
    _, recorder = run(tmp_path, resume=True)
    assert recorder.ran_with == pytest.approx([0.6 * max(0, 1 - t / 8) for t in range(5, NUM_ITERS)], abs=1e-12)


def test_prolonging_a_finished_run_does_not_raise_gamma(tmp_path):
    run(tmp_path)
    runner, recorder = run(tmp_path, resume=True, max_iters=2 * NUM_ITERS)
    assert len(recorder.ran_with) == NUM_ITERS and set(recorder.ran_with) == {0.0}


@pytest.mark.parametrize('update_buffers', [False, True])
def test_averaged_weights_carry_the_runners_gamma(tmp_path, update_buffers):
    from mmengine.hooks import EMAHook

    run(tmp_path, custom_hooks=[EMAHook(momentum=0.1, update_buffers=update_buffers)], val=True)
    for t, gamma in ((4, 0.5), (NUM_ITERS, 0.0)):
        saved = torch.load(tmp_path / f'iter_{t}.pth', weights_only=False)
        assert saved['state_dict']['norms.0._gamma'].item() == gamma
        assert saved['ema_state_dict']['module.norms.0._gamma'].item() == gamma


def test_a_run_that_ends_with_layer_norm_left_says_so(tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        runner, _ = run(tmp_path, hook=ProgressiveNormHook(total=20, unit='iter'))
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'The run ended with gamma = 0.5' in log and 'Lower `total`' in log


def test_a_model_without_prepbn_gets_a_warning(tmp_path):
    class Reader(Recorder):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            raise KeyboardInterrupt

    model = Regression()
    model.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
    run(tmp_path, model=model, recorder=Reader())
    assert 'the model has no PRepBN' in next(tmp_path.glob('*/*.log')).read_text()


@pytest.mark.parametrize('arguments', [dict(total=-1), dict(total=1.5), dict(decay='exponential'), dict(unit='steps')])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        ProgressiveNormHook(**arguments)


@pytest.mark.parametrize('gamma, loaded, refused', [(1.0, False, True), (1.0, True, False), (0.0, False, False)])
def test_a_frozen_layernorm_is_not_replaced_by_what_never_trained(small_run_cfg, gamma, loaded, refused):
    runner = Runner.from_cfg(small_run_cfg(max_iters=1, frozen_stages=1))
    for norm in runner.model.modules():
        if isinstance(norm, PRepBN):
            norm.gamma, norm.statistics_loaded = gamma, loaded
    hook = next(hook for hook in runner.hooks if isinstance(hook, ProgressiveNormHook))
    runner.train_loop  # noqa: B018 (builds it)
    if refused:
        with pytest.raises(SlabDetError, match=r'frozen norms are still LayerNorm \(backbone.*frozen_stages=-1'):
            hook.before_train(runner)
    else:
        hook.before_train(runner)
