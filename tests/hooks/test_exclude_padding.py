"""ExcludePaddingHook in a real run on images of several sizes."""

import copy
import math
import pickle

import pytest
import torch
from mmdet.models import DetDataPreprocessor
from mmdet.structures import DetDataSample
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from slab_det.hooks.exclude_padding import exclude_padding
from slab_det.norms import PRepBN, TokenBN
from slab_det.norms.valid_tokens import ValidTokens
from slab_det.runtime.errors import SlabDetError

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
        inside = torch.tensor(
            [
                [i // columns * stride < height and i % columns * stride < width for i in range(x.shape[1])]
                for height, width in self.sizes
            ]
        )
        self.padded[norm] = 1 - inside.double().mean()
        self.all[norm], self.inside[norm] = x.flatten(0, 1).mean(0), x[inside].mean(0)


@pytest.fixture
def run(small_run_cfg):
    """A function: trains two iterations on images of several sizes and watches them."""

    def train(*hooks, **backbone):
        cfg = small_run_cfg('-'.join(['run', *(hook['type'] for hook in hooks)]), 2, **backbone)
        cfg.train_dataloader.dataset.pipeline.insert(
            2, dict(type='RandomChoiceResize', scales=[(40, 40), (70, 90), (96, 120)], keep_ratio=False)
        )
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

    assert exclude_padding(nn.LayerNorm(3), NoSamples()) is None
    model, preprocessor = nn.ModuleList([TokenBN(3), PRepBN(3)]), NoSamples()
    handle = exclude_padding(model, preprocessor)
    assert isinstance(model[0].valid_tokens, ValidTokens) and model[0].valid_tokens is model[1].repbn.valid_tokens
    with pytest.raises(SlabDetError, match='NoSamples.*img_shape'):
        preprocessor(torch.zeros(1, 3, 8, 8))
    handle.remove()
    assert preprocessor(torch.zeros(1, 3, 8, 8))['inputs'].shape == (1, 3, 8, 8)


@pytest.mark.parametrize(
    'copied', [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=['deepcopy', 'pickle']
)
def test_a_copy_of_the_model_knows_its_own_batches(copied):
    model = nn.ModuleDict(dict(data_preprocessor=DetDataPreprocessor(pad_size_divisor=32), norm=TokenBN(3)))
    exclude_padding(model, model.data_preprocessor)
    twin = copied(model)

    def see(model, height):
        sample = DetDataSample(metainfo=dict(img_shape=(height, 64)))
        model.data_preprocessor(dict(inputs=[torch.zeros(3, height, 64)], data_samples=[sample]), True)
        split = model.norm.split_padding(torch.zeros(1, 64 * 64, 3))
        return 64 * 64 if split is None else len(split.valid)

    assert [see(model, 40), see(twin, 64), see(model, 40)] == [40 * 64, 64 * 64, 40 * 64]


def test_nothing_of_the_hook_is_left_after_training(small_run_cfg):
    cfg = small_run_cfg(max_iters=1)
    cfg.custom_hooks = [dict(type='ExcludePaddingHook')]
    cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None)
    runner = Runner.from_cfg(cfg)
    model = runner.train()
    assert not model.data_preprocessor._forward_hooks
    assert all(norm.valid_tokens is None for norm in model.modules() if isinstance(norm, TokenBN))
