"""mmengine's mixed precision in real runs without a GPU."""

import pytest
import torch
from mmengine.device import get_device
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch import nn

from slab_det.norms import named_offline_norms
from slab_det.runtime.errors import SlabDetError

pytestmark = pytest.mark.skipif(get_device() != 'cpu', reason='with an accelerator it is mmengine that does this')


class Watch(Hook):
    """The dtype of a product in the backbone, and in iteration ``bad`` an image that overflows."""

    def __init__(self, bad=None):
        self.bad = bad
        self.dtypes, self.states = set(), []

    def before_train(self, runner):
        attention = runner.model.backbone.stages[0].blocks[0].attn.w_msa
        attention.qkv.register_forward_hook(lambda module, args, y: self.dtypes.add(y.dtype))
        runner.model.backbone.register_forward_pre_hook(
            lambda module, args: (args[0] * float('inf'),) if runner.iter == self.bad else None
        )

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.states.append({name: value.clone() for name, value in runner.model.state_dict().items()})


@pytest.fixture
def train(small_run_cfg):
    """A function: a run of three iterations and what was watched in it."""

    def run(watch, norm='PRepBN', resume=False, iters=3, **optim_wrapper):
        cfg = small_run_cfg('run', iters, norm_cfg=dict(type=norm))
        cfg.optim_wrapper.update(type='AmpOptimWrapper', **optim_wrapper)
        cfg.custom_hooks = []
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None, resume=resume)
        cfg.default_hooks.checkpoint.interval = 3
        cfg.experiment_name += f'-{iters}'
        runner = Runner.from_cfg(cfg)
        runner.register_hook(watch)
        runner.train()
        return runner

    return run


def test_a_run_trains_in_bfloat16_and_resumes(train, tmp_path):
    watch = Watch()
    runner = train(watch, loss_scale='dynamic')
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    assert watch.dtypes == {torch.bfloat16}
    first, last = watch.states[0], runner.model.state_dict()
    assert all(value.isfinite().all() for value in last.values())
    assert not torch.equal(
        first['backbone.patch_embed.projection.weight'], last['backbone.patch_embed.projection.weight']
    )
    assert {value.dtype for value in last.values() if value.is_floating_point()} == {torch.float32, torch.float64}
    checkpoint = torch.load(tmp_path / 'run' / 'iter_3.pth', weights_only=False)
    assert 'loss_scaler' not in checkpoint['optimizer'], 'an enabled scaler cannot take the state of a disabled one'
    log = next((tmp_path / 'run').glob('*/*.log')).read_text()
    assert 'autocast on the CPU to torch.bfloat16' in log and 'no scaling' in log
    assert train(Watch(), resume=True, iters=4).iter == 4


@pytest.mark.parametrize('norm', ['PRepBN', 'UN'])
def test_the_scaler_of_float16_skips_an_overflow_and_no_norm_has_seen_it(train, norm):
    watch = Watch(bad=1)
    runner = train(watch, norm, loss_scale=dict(init_scale=256.0), dtype='float16')
    assert watch.dtypes == {torch.float16}
    _, before, after = watch.states
    # Also that nothing was skipped but this.
    assert runner.optim_wrapper.loss_scaler.get_scale() == 128.0
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    last = runner.model.state_dict()
    for name, _ in named_offline_norms(runner.model):
        statistics = [key for key in last if key.startswith(name) and key.endswith('running_var')]
        assert statistics and all(
            last[key].isfinite().all() and not torch.equal(last[key], after[key]) for key in statistics
        ), name


def wrapper(**options):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return OPTIM_WRAPPERS.build(dict(type='AmpOptimWrapper', optimizer=optimizer, **options))


@pytest.mark.parametrize(
    'options', [dict(dtype='int8'), dict(dtype='float32'), dict(dtype=torch.float64), dict(use_fsdp=True)], ids=str
)
def test_what_a_cpu_cannot_do_is_named(options):
    with pytest.raises(SlabDetError, match='bfloat16 or float16'):
        wrapper(**options)


@pytest.mark.parametrize('loss_scale', ['static', None, 512], ids=str)
def test_a_loss_scale_of_no_known_kind_is_named(loss_scale):
    with pytest.raises(SlabDetError, match='loss_scale'):
        wrapper(loss_scale=loss_scale)


def test_a_fixed_scale_and_the_state_of_a_scaler_travel():
    half, brain = wrapper(loss_scale=32.0, dtype='float16'), wrapper(loss_scale=32.0)
    assert half.loss_scaler.get_scale() == 32.0 and half.state_dict()['loss_scaler']['scale'] == 32.0
    # A run that began on a GPU, in float16, goes on here in bfloat16; and back.
    brain.load_state_dict(half.state_dict())
    half.load_state_dict(brain.state_dict())
    assert half.loss_scaler.get_scale() == 32.0
    assert isinstance(brain, OptimWrapper) and not brain.loss_scaler.is_enabled()
