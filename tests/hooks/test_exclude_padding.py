"""ExcludePaddingHook in a real run on images of several sizes."""
import math

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from slab_det.errors import SlabDetError
from slab_det.hooks.exclude_padding import exclude_padding
from slab_det.layers import PRepBN, TokenBN
from slab_det.layers.valid_tokens import ValidTokens

NORMS = ['backbone.patch_embed.norm', 'backbone.stages.1.downsample.norm', 'backbone.norm3']


class Watch(Hook):
    """Means of what reaches norms in the last training batch: of all tokens, and of those inside images."""

    def before_train(self, runner):
        runner.model.data_preprocessor.register_forward_hook(self.keep_sizes)
        self.all, self.inside, self.padded = {}, {}, {}
        for name in NORMS:
            runner.model.get_submodule(name).register_forward_hook(self.measure)

    def keep_sizes(self, module, args, batch):
        self.sizes = [sample.img_shape for sample in batch['data_samples']]
        self.shape = batch['inputs'].shape[-2:]

    def measure(self, norm, args, y):
        if not norm.training:
            return
        x = args[0].detach().double()
        stride = math.isqrt(self.shape[0] * self.shape[1] // x.shape[1])
        columns = self.shape[1] // stride
        inside = torch.tensor([[i // columns * stride < height and i % columns * stride < width
                                for i in range(x.shape[1])] for height, width in self.sizes])
        self.padded[norm] = 1 - inside.double().mean()
        self.all[norm], self.inside[norm] = x.flatten(0, 1).mean(0), x[inside].mean(0)


@pytest.fixture
def run(small_run_cfg):
    """A function: trains two iterations on images of several sizes and watches them."""
    def train(*hooks, **backbone):
        cfg = small_run_cfg('-'.join(['run', *(hook['type'] for hook in hooks)]), 2, **backbone)
        cfg.train_dataloader.dataset.pipeline.insert(2, dict(
            type='RandomChoiceResize', scales=[(40, 40), (70, 90), (96, 120)], keep_ratio=False))
        cfg.custom_hooks = list(hooks)
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None)
        runner, watch = Runner.from_cfg(cfg), Watch()
        runner.register_hook(watch)
        runner.train()
        return watch
    return train


def test_running_statistics_are_those_of_the_images(run):
    excluded = dict(type='ExcludePaddingHook')
    for hooks, seen in (((), 'all'), ((excluded,), 'inside')):
        # With momentum 1 the last batch is all there is.
        watch = run(*hooks, norm_cfg=dict(type='PRepBN', momentum=1.0))
        assert len(watch.padded) == len(NORMS)
        for norm, padded in watch.padded.items():
            assert padded > 0.1 and not torch.allclose(watch.all[norm], watch.inside[norm], rtol=0.02, atol=1e-3)
            mean = norm.statistics()[0].double()
            torch.testing.assert_close(mean, getattr(watch, seen)[norm], rtol=1e-4, atol=1e-5)


def test_other_norms_are_left_alone_and_a_preprocessor_without_sizes_is_named():
    class NoSamples(nn.Module):
        def forward(self, data):
            return dict(inputs=data)

    assert exclude_padding(nn.LayerNorm(3), NoSamples()) == 0
    model, preprocessor = nn.ModuleList([TokenBN(3), PRepBN(3)]), NoSamples()
    assert exclude_padding(model, preprocessor) == 2
    assert isinstance(model[0].valid_tokens, ValidTokens) and model[0].valid_tokens is model[1].repbn.valid_tokens
    with pytest.raises(SlabDetError, match='NoSamples.*img_shape'):
        preprocessor(torch.zeros(1, 3, 8, 8))
