"""adopt replaces mmdet's blocks by slab_det's, which hold the same layers and compute the same."""

import copy
import inspect
import re
from pathlib import Path

import mmdet
import pytest
import torch
from conftest import relative_difference
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.pvt import PVTEncoderLayer, SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinBlock
from mmdet.models.layers import PatchMerging
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.model import ExponentialMovingAverage
from torch import nn

import slab_det
from slab_det.backbones.adopt import adopt, why_not_adopted
from slab_det.backbones.blocks import Block
from slab_det.norms import PRepBN

FOREIGN = SwinBlock, PVTEncoderLayer, ShiftWindowMSA, PatchMerging
CONFIGS = Path(mmdet.__file__).parent / '.mim' / 'configs'


def mmdet_backbones() -> dict[str, dict]:
    """The Swin and PVT backbones of mmdet's configs, narrow and shallow, by the first config of each."""
    found = {}
    for file in sorted(CONFIGS.rglob('*.py')):
        if not re.search('swin|pvt', file.name):
            continue
        backbone = Config.fromfile(file).get('model', {}).get('backbone', {})
        if backbone.get('type') in ('SwinTransformer', 'PyramidVisionTransformer', 'PyramidVisionTransformerV2'):
            cfg = {key: value for key, value in backbone.to_dict().items() if key not in ('init_cfg', '_delete_')}
            for key in ('pretrain_img_size', 'convert_weights', 'frozen_stages', 'out_indices'):
                cfg.pop(key, None)
            depths, stages = (
                'depths' if cfg['type'] == 'SwinTransformer' else 'num_layers',
                len(cfg.get('depths', '1234')),
            )
            cfg.update({depths: [2] * stages, 'num_heads': [1, 2, 4, 8, 16][:stages]}, embed_dims=8)
            found.setdefault(repr(cfg), (file.stem, cfg))
    return dict(found.values())


BACKBONES = mmdet_backbones()


def build(cfg: dict) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(cfg).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def adopted(model: nn.Module) -> nn.Module:
    own = copy.deepcopy(model)
    adopt(own)
    return own


def test_mmdet_has_configs_of_every_kind():
    assert {cfg['type'] for cfg in BACKBONES.values()} == {
        'SwinTransformer', 'PyramidVisionTransformer', 'PyramidVisionTransformerV2'
    }  # fmt: skip


@pytest.mark.parametrize('name', BACKBONES)
def test_an_adopted_backbone_of_mmdet_computes_the_same_in_both_modes(name):
    model = build(BACKBONES[name])
    own = adopted(model)
    assert not any(isinstance(module, FOREIGN) for module in own.modules())
    assert sum(isinstance(module, Block) for module in own.modules()) in (8, 10)
    assert not any(tensor.is_meta for tensor in [*own.parameters(), *own.buffers()])
    image = torch.randn(1, 3, 75, 102).double()
    for training in (False, True):
        outputs, gradients = [], []
        for net in (model, own):
            net.train(training)
            torch.manual_seed(1)
            outputs.append(net(image))
            net.zero_grad()
            sum(output.square().mean() for output in outputs[-1]).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        assert relative_difference(outputs[1], outputs[0]) <= 1e-12
        assert relative_difference([gradients[1]], [gradients[0]]) <= 1e-10


@pytest.mark.parametrize('name', [*{cfg['type']: name for name, cfg in BACKBONES.items()}.values()])
def test_checkpoints_and_averages_fit_both_ways(name):
    model = build(BACKBONES[name])
    own = adopted(model)
    # In the same order, in which averages of weights are kept.
    assert [*own.state_dict()] == [*model.state_dict()]
    assert [*map(id, adopt_in_place(model).parameters())] == [*map(id, model.parameters())]
    for source, target in ((build(BACKBONES[name]), own), (own, build(BACKBONES[name]))):
        with torch.no_grad():
            next(source.parameters()).add_(1)
        target.load_state_dict(source.state_dict(), strict=True)
        average = ExponentialMovingAverage(target)
        average.update_parameters(source)
        assert all(torch.isfinite(value).all() for value in average.state_dict().values())


def adopt_in_place(model: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers with ``model``, adopted."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    own = copy.deepcopy(model, shared)
    adopt(own)
    return own


def test_frozen_stages_stay_in_eval_mode():
    model = build(dict(type='SwinTransformer', embed_dims=16, depths=(2, 2), num_heads=(1, 2), strides=(4, 2),
                       out_indices=(0, 1), frozen_stages=1))  # fmt: skip
    model.train()
    modes = {name: module.training for name, module in model.named_modules()}
    adopt(model)
    assert {modes[name] for name, _ in model.named_modules() if name in modes} == {False, True}
    for name, module in model.named_modules():
        assert module.training == modes.get(name, module.training), name


# Every argument of mmdet's layers with a value that is not its default: an adopted layer computes the same, or stays.
SIZES = dict(embed_dims=16, num_heads=2)
DROP = dict(type='DropPath', drop_prob=0.5)
ARGUMENTS = {
    SwinBlock: dict(
        SIZES, feedforward_channels=24, window_size=5, shift=True, qkv_bias=False, qk_scale=0.3, drop_rate=0.3,
        attn_drop_rate=0.3, drop_path_rate=0.3, act_cfg=dict(type='ReLU'), norm_cfg=dict(type='LN', eps=0.3),
        with_cp=True, init_cfg=None,
    ),
    ShiftWindowMSA: dict(
        SIZES, window_size=5, shift_size=2, qkv_bias=False, qk_scale=0.3, attn_drop_rate=0.3, proj_drop_rate=0.3,
        dropout_layer=DROP, init_cfg=None,
    ),
    PVTEncoderLayer: dict(
        SIZES, feedforward_channels=24, drop_rate=0.3, attn_drop_rate=0.3, drop_path_rate=0.3, qkv_bias=False,
        act_cfg=dict(type='ReLU'), norm_cfg=dict(type='LN', eps=0.3), sr_ratio=2, use_conv_ffn=True, init_cfg=None,
    ),
    SpatialReductionAttention: dict(
        SIZES, attn_drop=0.3, proj_drop=0.3, dropout_layer=DROP, batch_first=False, qkv_bias=False,
        norm_cfg=dict(type='LN', eps=0.3), sr_ratio=2, init_cfg=None,
    ),
    PatchMerging: dict(
        in_channels=16, out_channels=24, kernel_size=3, stride=3, padding='same', dilation=2, bias=True,
        norm_cfg=None, init_cfg=None,
    ),
}  # fmt: skip


# Dropout of tokens that lie in another order in memory: it draws the same numbers for other tokens.
DRAWS_OTHERWISE = {'drop_rate', 'proj_drop_rate', 'proj_drop'}


def argument_cases():
    """Each class with each of its optional arguments alone, and one case with the required ones."""
    for kind, values in ARGUMENTS.items():
        parameters = inspect.signature(kind).parameters
        required = {name: values[name] for name in values if parameters[name].default is inspect.Parameter.empty}
        for name in ('', *(name for name in values if name not in required)):
            arguments = {**required, **({name: values[name]} if name else {})}
            yield pytest.param(kind, arguments, name not in DRAWS_OTHERWISE, id=f'{kind.__name__} {name}')


def test_every_argument_of_mmdets_layers_has_a_case():
    for kind, values in ARGUMENTS.items():
        assert inspect.signature(kind).parameters.keys() == values.keys(), kind


@pytest.mark.parametrize(('kind', 'arguments', 'draws_same'), [*argument_cases()])
def test_a_layer_with_any_argument_computes_the_same_or_stays(kind, arguments, draws_same):
    torch.manual_seed(0)
    holder = nn.Sequential(kind(**arguments)).double()
    for parameter in holder.parameters():
        nn.init.normal_(parameter, std=0.2)
    own = copy.deepcopy(holder)
    adopt(own)
    reason = why_not_adopted(holder[0])
    assert (type(own[0]) is kind) == bool(reason)
    x, size = torch.randn(2, 7 * 6, 16).double(), (7, 6)
    rates = [{part.p for part in net.modules() if isinstance(part, nn.Dropout)} for net in (own, holder)]
    assert draws_same or 0.3 in rates[0] & rates[1]
    for training in (False, True)[: 1 + draws_same]:
        outputs = []
        for layer in (own[0], holder[0]):
            layer.train(training)
            torch.manual_seed(1)
            outputs.append(layer(x, size))
        torch.testing.assert_close(*outputs, rtol=1e-11, atol=1e-11)


class OtherBlock(SwinBlock):
    pass


def small_swin() -> nn.Module:
    cfg = dict(type='SwinTransformer', embed_dims=16, depths=(1,), num_heads=(1,), strides=(4,), out_indices=(0,))
    model = build(dict(cfg, norm_cfg=dict(type='PRepBN')))
    model.eval()  # no chaining: the eval() of mmdet's backbones returns None
    return model


def add_subclass(block: nn.Module) -> None:
    block.__class__ = OtherBlock


def add_layer_scale(block: nn.Module) -> None:
    scaled = FFN(16, 64, act_cfg=dict(type='GELU'), layer_scale_init_value=0.5).double().eval()
    scaled.layers, block.ffn = block.ffn.layers, scaled


def add_hook(block: nn.Module) -> None:
    block.attn.register_forward_hook(lambda module, args, output: 2 * output)


def add_forward(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x, hw_shape: 2 * forward(x, hw_shape)


@pytest.mark.parametrize(
    ('change', 'reason', 'left'),
    [
        (add_subclass, 'OtherBlock is a subclass', ['norm1', 'norm2']),
        (add_layer_scale, 'LayerScale', []),
        (add_hook, 'attn has forward hooks', ['norm1']),
        (add_forward, 'SwinBlock has a forward of its own', []),
    ],
)
@torch.no_grad()
def test_a_block_that_does_more_stays_and_fusion_stays_exact(change, reason, left):
    model = small_swin()
    slab_det.set_gamma(model, 0.0)
    for norm in (module for module in model.modules() if isinstance(module, PRepBN)):
        norm.set_statistics(torch.randn_like(norm.repbn.running_mean), torch.rand_like(norm.repbn.running_var) + 0.1)
    block = model.stages[0].blocks[0]
    change(block)
    assert reason in why_not_adopted(block)
    # With padded windows.
    image = torch.randn(1, 3, 40, 36).double()
    expected = model(image)
    fused = slab_det.fuse(model)
    assert type(fused.stages[0].blocks[0]) is type(block)
    assert relative_difference(fused(image), expected) <= 1e-9
    affine = [fusion.norm for fusion in fused.fusion_report.norms if fusion.outcome == 'affine']
    assert affine == [*(f'stages.0.blocks.0.{norm}' for norm in left), 'norm0']
