"""SLABSwin against mmdet's and timm's Swin, and what its own arguments promise."""

import copy
import inspect

import pytest
import timm
import torch
from conftest import CONFIGS, live_tensors
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import SwinTransformer
from mmengine.config import Config
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import build_optim_wrapper
from mmengine.runner.checkpoint import get_state_dict, load_state_dict
from torch import nn

from slab_det.backbones import SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.fusion import fuse
from slab_det.norms import PRepBN, set_gamma

SMALL = dict(embed_dims=8, depths=(2, 2, 2), num_heads=(1, 2, 4), strides=(4, 2, 2), out_indices=(0, 1, 2))
PREPBN = dict(type='PRepBN')
SLAB = dict(attention=('sla', 'focused', 'softmax'), window_sizes=(6, 5, 4))


@torch.no_grad()
def randomize(model: nn.Module) -> nn.Module:
    for name, value in live_tensors(model).items():
        if name.endswith('running_var'):
            value.uniform_(0.5, 2)
        elif value.is_floating_point() and not name.endswith('_gamma'):
            value.normal_(std=0.3)
    return model


def gamma_zero(model: nn.Module) -> nn.Module:
    set_gamma(model, 0.0)
    return model


def assert_same(ours: tuple, theirs: tuple, tolerance: float = 1e-9) -> None:
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape, f'output {i}'
        error = ((one - other).abs().max() / other.abs().max()).item()
        assert error < tolerance, f'output {i}: relative error {error:.1e}'


@pytest.mark.parametrize('size', [(32, 32), (75, 43), (113, 37), (29, 150)])
@pytest.mark.parametrize(
    'config',
    [
        {},
        dict(window_size=4, use_abs_pos_embed=False, qkv_bias=False),
        dict(window_size=5, patch_norm=False, qk_scale=0.3, out_indices=(1, 2)),
    ],
)
@torch.no_grad()
def test_equals_mmdet_given_the_same_state_dict(size, config):
    config = {**SMALL, **config}
    ours, theirs = SLABSwin(**config).double(), randomize(SwinTransformer(**config).double())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours.eval(), theirs.eval()
    x = torch.randn(2, 3, *size, dtype=torch.double)
    assert_same(ours(x), theirs(x))


@torch.no_grad()
def test_position_embedding_equals_mmdet_at_its_own_size():
    config = dict(**SMALL, use_abs_pos_embed=True, pretrain_img_size=64)
    ours, theirs = SLABSwin(**config).double().eval(), randomize(SwinTransformer(**config).double())
    theirs.eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 64, 64, dtype=torch.double)
    assert_same(ours(x), theirs(x))
    assert ours(torch.randn(1, 3, 50, 90, dtype=torch.double))[0].shape == (1, 8, 13, 23)


def test_training_gradients_equal_mmdet():
    config = dict(**SMALL, drop_path_rate=0.0)
    ours, theirs = SLABSwin(**config).double(), randomize(SwinTransformer(**config).double())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 45, 70, dtype=torch.double)
    for model in (ours, theirs):
        model.train()
        sum(out.pow(2).sum() for out in model(x)).backward()
    # Loaded as weights are, gradients take the order of channels that ours computes in.
    expected = SLABSwin(**config).double()
    expected.load_state_dict({name: parameter.grad for name, parameter in theirs.named_parameters()}, strict=False)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get_parameter(name), rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize('norm', ['LN', 'PRepBN', 'UN'])
@torch.no_grad()
def test_patch_merging_keeps_the_layout_of_mmdet_in_every_state_dict(norm):
    source = randomize(SLABSwin(**SMALL, norm_cfg=dict(type=norm)).double()).eval()
    state, x = source.state_dict(), torch.randn(1, 3, 45, 70, dtype=torch.double)
    copies = {
        'load_state_dict': SLABSwin(**SMALL, norm_cfg=dict(type=norm)).double().eval(),
        'assign': SLABSwin(**SMALL, norm_cfg=dict(type=norm)).double().eval(),
        'mmengine': SLABSwin(**SMALL, norm_cfg=dict(type=norm)).double().eval(),
        'deepcopy': copy.deepcopy(source),
        'EMA': ExponentialMovingAverage(source).module,
    }
    copies['load_state_dict'].load_state_dict(state)
    copies['assign'].load_state_dict(state, assign=True)
    load_state_dict(copies['mmengine'], get_state_dict(source), strict=True)
    for way, model in copies.items():
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()), way
        assert_same(model(x), source(x))


def test_arguments_and_keys_are_mmdets():
    ours, theirs = (inspect.signature(kind).parameters for kind in (SLABSwin, SwinTransformer))
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
    assert list(ours)[: len(theirs)] == list(theirs), 'positional arguments mean the same'
    assert {key: value.shape for key, value in SLABSwin().state_dict().items()} == {
        key: value.shape for key, value in SwinTransformer().state_dict().items()
    }


def microsoft_state(model: nn.Module) -> dict:
    """timm's weights in Microsoft's layout: patch merging ends a stage instead of beginning the next."""
    state = {}
    for key, value in model.state_dict().items():
        parts = key.split('.')
        if parts[0] == 'layers' and parts[2] == 'downsample':
            parts[1] = str(int(parts[1]) - 1)
        state['.'.join(parts)] = value
    return state


@pytest.mark.parametrize(
    ('kwargs', 'stages'),
    [
        # At 224 the last map is one window, and stock timm does not shift it.
        (dict(), 3),
        # Built for 448 it keeps the shift, as detection does, whatever it is fed.
        (dict(img_size=448, strict_img_size=False), 4),
    ],
)
@torch.no_grad()
def test_equals_timm_at_224(kwargs, stages):
    theirs = timm.create_model('swin_tiny_patch4_window7_224', **kwargs).double().eval()
    for name, parameter in theirs.named_parameters():
        if parameter.ndim == 1 or 'table' in name:
            parameter.normal_(1.0 if name.endswith('weight') else 0.0, 0.3)
    ours = SLABSwin(out_norm_cfg=None).double().eval()
    report = load_pretrained(ours, microsoft_state(theirs))
    assert report.format == 'microsoft_swin'
    assert report.complete, str(report)
    x = torch.randn(1, 3, 224, 224, dtype=torch.double)
    assert_same(ours(x)[:stages], theirs.forward_intermediates(x, intermediates_only=True)[:stages])


def test_one_word_or_one_per_stage():
    model = SLABSwin(**SMALL, **SLAB)
    kinds = [type(stage.blocks[0].attn.w_msa).__name__ for stage in model.stages]
    assert kinds == ['SimplifiedWindowAttention', 'FocusedWindowAttention', 'SoftmaxWindowAttention']
    assert [[block.attn.shift_size for block in stage.blocks] for stage in model.stages] == [[0, 3], [0, 2], [0, 2]]
    model = SLABSwin(**SMALL, attention='sla')
    assert {block.attn.w_msa.window_size for stage in model.stages for block in stage.blocks} == {7}


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (dict(attention='linear'), 'unknown attention.*linear'),
        (dict(attention=('sla', 'softmax')), 'attention=.*3 stages'),
        (dict(window_sizes=(7, 7)), 'window_sizes=.*3 stages'),
        (dict(window_sizes=(7, 0, 7)), 'positive'),
        (dict(num_heads=(1, 3, 4)), 'does not divide'),
        (dict(num_heads=(1, 2)), 'num_heads=.*3 stages'),
        (dict(strides=(2, 2, 2)), 'patches must not overlap'),
        (dict(strides=(4, 2, 0)), 'strides=.*positive whole numbers'),
        (dict(num_heads=(1, 2, -2)), 'num_heads=.*positive whole numbers'),
        (dict(window_sizes=(7, 7, 3.5)), 'window_sizes=.*positive whole numbers'),
        (dict(depths=(2, 2, 1.5)), 'depths=.*0 or more'),
        (dict(mlp_ratio=0), 'mlp_ratio=0 leaves no hidden channel'),
        (dict(embed_dims=0), 'embed_dims=0: give positive whole numbers'),
        (dict(out_indices=(0, 4)), r'out_indices=\(0, 4\)'),
        (dict(out_indices=(-1,)), r'out_indices=\(-1,\)'),
        (dict(out_indices=(0, 0)), r'out_indices=\(0, 0\)'),
        (dict(norm_cfg=dict(type='NoNorm')), "there is no norm called 'NoNorm'"),
        (dict(norm_cfg=dict(type='BN')), 'takes channels first.*TokenBN'),
        (dict(norm_cfg=None), "norm_cfg must be a dict with a 'type'"),
        (dict(ffn_norm='before'), 'unknown ffn_norm.*pre_act.*post_act'),
        (dict(pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth')), 'two sources'),
    ],
)
def test_wrong_arguments_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        SLABSwin(**{**SMALL, **config})


@pytest.mark.parametrize('out_norm', ['same', dict(type='LN'), None])
def test_output_norms(out_norm):
    model = SLABSwin(**SMALL, norm_cfg=PREPBN, out_norm_cfg=out_norm)
    kind = {'same': PRepBN}.get(out_norm, nn.Identity) if not isinstance(out_norm, dict) else nn.LayerNorm
    assert all(type(getattr(model, f'norm{i}')) is kind for i in range(3))


@pytest.mark.parametrize(
    ('gamma', 'ffn_norm'), [(0.0, None), (0.5, None), (1.0, None), (0.0, 'pre_act'), (0.5, 'post_act')]
)
def test_with_cp_changes_nothing(gamma, ffn_norm):
    # Dropout and drop-path included: the random state is replayed.
    config = dict(**SMALL, **SLAB, norm_cfg=PREPBN, drop_path_rate=0.3, drop_rate=0.1, ffn_norm=ffn_norm)
    plain = randomize(SLABSwin(**config).double())
    recomputed = SLABSwin(**config, with_cp=True).double()
    set_gamma(plain, gamma)
    recomputed.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 45, 70, dtype=torch.double)
    outputs = []
    for model in (plain, recomputed):
        model.train()
        torch.manual_seed(3)
        for _ in range(2):
            outputs.append(model(x))
            sum(out.pow(2).mean() for out in outputs[-1]).backward()
    for ours, theirs in zip(outputs[:2], outputs[2:], strict=True):
        assert_same(ours, theirs)
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
    for (name, one), (_, other) in zip(plain.named_buffers(), recomputed.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_frozen_stages_stay_as_they_are():
    model = SLABSwin(**SMALL, norm_cfg=PREPBN, frozen_stages=2)
    set_gamma(model, 0.5)
    model.train()
    frozen = ('patch_embed.', 'stages.0.', 'stages.1.', 'norm0.', 'norm1.')
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sum(out.mean() for out in model(torch.randn(2, 3, 40, 40))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(frozen), name
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved, 'statistics of the live stage'
    assert not [key for key in moved if key.startswith(frozen)]


def test_norm_eval_freezes_loaded_statistics_only():
    source, model = (SLABSwin(**SMALL, norm_cfg=PREPBN, norm_eval=True) for _ in range(2))
    gamma_zero(randomize(source))
    # Initial statistics do not count as loaded.
    source.norm2.set_statistics(torch.zeros(32), torch.ones(32))
    model.load_state_dict(source.state_dict())
    gamma_zero(model)
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(torch.randn(2, 3, 40, 40))
    moved = {key.split('.')[0] for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {'norm2'}
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN', 'PRepBN', 'UN', 'MABN', 'PowerNorm'])
def test_norm_eval_freezes_no_statistics_that_were_never_estimated(norm):
    """A LayerNorm model converted without calibration saves mean 0 and variance 1, which is no norm at all."""
    model = SLABSwin(**SMALL, norm_cfg=dict(type=norm), norm_eval=True)
    model.load_state_dict(gamma_zero(SLABSwin(**SMALL, norm_cfg=dict(type=norm))).state_dict())
    assert model.train().norm1.training
    # One channel of one of them is enough.
    for name in ('running_mean', 'running_var'):
        state = SLABSwin(**SMALL, norm_cfg=dict(type=norm)).state_dict()
        key = next((key for key in state if key.startswith('norm1.') and key.endswith(name)), None)
        if key is None:
            continue
        state[key][3] += 0.25
        model.load_state_dict(state)
        assert not model.train().norm1.training, name
        assert model.norm0.training, name


def test_tokens_lie_together_in_every_block_also_without_a_norm_before(small_detector):
    backbone = fuse(small_detector(norm_cfg=dict(type='PRepBN'))).backbone
    contiguous = []
    for stage in backbone.stages:
        for block in stage.blocks:
            block.register_forward_pre_hook(lambda module, args: contiguous.append(args[0].is_contiguous()))
    backbone(torch.randn(2, 3, 50, 62))
    assert contiguous == [True] * sum(len(stage.blocks) for stage in backbone.stages)


def test_train_and_eval_return_the_model_and_set_the_mode():
    model = SLABSwin(**SMALL, norm_cfg=PREPBN)
    for mode in (True, False):
        assert model.train(mode) is model
        assert {module.training for module in model.modules()} == {mode}
    assert model.eval() is model


def ffn_norm_keys(model: nn.Module) -> set[str]:
    return {key for key in model.state_dict() if '.ffn.norm.' in key}


def test_ffn_norm_adds_one_norm_per_block_and_no_other_key():
    plain = SLABSwin(**SMALL, norm_cfg=PREPBN)
    assert {type(block.ffn) for stage in plain.stages for block in stage.blocks} == {FFN}
    for word in ('pre_act', 'post_act'):
        model = SLABSwin(**SMALL, norm_cfg=PREPBN, ffn_norm=word)
        added = ffn_norm_keys(model)
        assert set(model.state_dict()) - added == set(plain.state_dict())
        for i, channels in enumerate((8, 16, 32)):
            norms = [block.ffn.norm for block in model.stages[i].blocks]
            assert [(type(norm), norm.num_features) for norm in norms] == [(PRepBN, 4 * channels)] * 2
    assert list(inspect.signature(SLABSwin).parameters)[-2:] == ['norm_eval', 'ffn_norm']


def test_an_ffn_norm_that_the_checkpoint_lacks_is_reported():
    """A LayerNorm Swin fills all but the norms that it does not have; those stay live under norm_eval."""
    theirs = randomize(SwinTransformer(**SMALL))
    ours = SLABSwin(**SMALL, norm_cfg=dict(type='TokenBN'), ffn_norm='pre_act', norm_eval=True)
    report = load_pretrained(ours, theirs.state_dict())
    assert set(report.missing_unexpected) == ffn_norm_keys(ours)
    assert not report.complete
    for key in ('stages.1.blocks.1.ffn.layers.0.0.weight', 'stages.1.blocks.1.ffn.layers.1.bias'):
        assert torch.equal(ours.state_dict()[key], theirs.state_dict()[key]), key
    # With statistics of a checkpoint of its own they are frozen.
    randomize(ours)
    other = SLABSwin(**SMALL, norm_cfg=dict(type='TokenBN'), ffn_norm='pre_act', norm_eval=True)
    assert load_pretrained(other, ours.state_dict()).complete
    assert ours.train().stages[0].blocks[0].ffn.norm.training
    assert not other.train().stages[0].blocks[0].ffn.norm.training


def test_the_schedules_put_no_weight_decay_on_ffn_norms():
    model = SLABSwin(**SMALL, norm_cfg=dict(type='RepBN'), ffn_norm='post_act')
    cfg = Config.fromfile(CONFIGS / '_base_/schedules/adamw_1x.py').optim_wrapper
    groups = build_optim_wrapper(model, cfg).optimizer.param_groups
    decay = {id(parameter): group['weight_decay'] for group in groups for parameter in group['params']}
    decays = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert {decays[name] for name in decays if '.ffn.norm.' in name} == {0.0}
    assert {decays[name] for name in decays if '.ffn.layers.' in name} == {0.05}


@pytest.mark.parametrize('init_cfg', [dict(type='Normal'), dict(type='Pretrained')])
def test_init_cfg_other_than_pretrained_is_refused(init_cfg):
    with pytest.raises(ValueError, match='init_cfg'):
        SLABSwin(**SMALL, init_cfg=init_cfg).init_weights()


def test_init_weights_starts_as_swin_does():
    model = SLABSwin(**SMALL, **SLAB, norm_cfg=PREPBN)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith('positional_encoding') or ('qkv' in name and name.endswith('bias')):
            assert not parameter.any(), name
        elif name.endswith(('qkv.weight', 'bias_table')):
            assert 0.01 < parameter.std() < 0.03, name
    assert all(norm.gamma == 1.0 for norm in model.modules() if isinstance(norm, PRepBN))
