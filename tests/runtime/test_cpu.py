"""``--amp`` without a GPU, in a real run."""

import pytest
import torch
from mmengine.device import get_device
from mmengine.hooks import Hook
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch import nn

from slab_det.runtime.errors import SlabDetError

pytestmark = pytest.mark.skipif(get_device() != 'cpu', reason='with an accelerator it is mmengine that does this')


class WatchDtypes(Hook):
    """The dtypes of a product in the backbone."""

    def before_train(self, runner):
        self.found = set()
        attention = runner.model.backbone.stages[0].blocks[0].attn.w_msa
        attention.qkv.register_forward_hook(lambda module, args, y: self.found.add(y.dtype))


def test_a_run_trains_in_bfloat16_and_resumes(small_run_cfg):
    for iters in (3, 4):
        cfg = small_run_cfg('run', iters)
        cfg.optim_wrapper.update(type='AmpOptimWrapper', loss_scale='dynamic')
        cfg.custom_hooks = []
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None, resume=iters == 4)
        cfg.default_hooks.checkpoint.interval = 3
        cfg.experiment_name += f'-{iters}'
        runner = Runner.from_cfg(cfg)
        first = runner.model.backbone.patch_embed.projection.weight.detach().clone()
        watch = WatchDtypes()
        runner.register_hook(watch)
        runner.train()
        assert watch.found == {torch.bfloat16} and runner.iter == iters
        last = runner.model.state_dict()
        assert all(value.isfinite().all() for value in last.values())
        assert not torch.equal(first, last['backbone.patch_embed.projection.weight'])
        assert {value.dtype for value in last.values() if value.is_floating_point()} == {torch.float32, torch.float64}


def test_another_dtype_is_an_error():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(SlabDetError, match="leave out dtype='float16'"):
        OPTIM_WRAPPERS.build(dict(type='AmpOptimWrapper', optimizer=optimizer, dtype='float16'))
