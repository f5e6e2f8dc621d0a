"""Replaces layers of a model, in place.

:func:`adopt` turns mmdet's Swin and PVT blocks into slab_det's, which hold the same layers under the same names;
:func:`replace_layers` puts in what a function makes of each layer, as deploying and exporting do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer, SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinBlock, WindowMSA
from mmdet.models.layers import PatchMerging as MmdetPatchMerging
from torch import nn

from slab_det.attention import ShiftedWindowAttention, SoftmaxMapAttention, SoftmaxWindowAttention
from slab_det.backbones.blocks import Block, ConvFFN, LinearFFN, PatchMerging
from slab_det.norms.folds import CannotFold, describe_hooks

MMDET_ATTENTIONS = (ShiftWindowMSA, SpatialReductionAttention)
Module = TypeVar('Module', bound=nn.Module)


def adopt(model: nn.Module) -> None:
    """Replaces mmdet's Swin, PVT and PVTv2 blocks and patch mergings by slab_det's, in place.

    The new modules hold the layers of the old ones. Parameters, buffers and state-dict keys stay; outputs differ by
    rounding, in training mode too. A module that is not exactly mmdet's stays; :func:`why_not_adopted` says why.

    Args:
        model: A detector or a backbone.
    """
    _adopt_children(model, {})


def _adopt_children(parent: nn.Module, own: dict[nn.Module, nn.Module]) -> None:
    # Not named_children(): a module may have several names.
    for name, child in parent._modules.items():
        if child not in own and type(child) in _MAKERS:
            with suppress(CannotFold):
                own[child] = _make_own(child)
        if child in own:
            parent._modules[name] = own[child]
        elif child is not None:
            _adopt_children(child, own)


def why_not_adopted(module: nn.Module) -> str:
    """Why a block, an attention or a patch merging of mmdet stays what it is; '' for every other module."""
    if isinstance(module, tuple(_MAKERS)):
        try:
            _make_own(module)
        except CannotFold as reason:
            return str(reason)
    return ''


def _make_own(module: nn.Module) -> nn.Module:
    """Makes slab_det's form of a module of mmdet; raises CannotFold if the module does more than mmdet's class."""
    kind = type(module).__name__
    if type(module) not in _MAKERS:
        raise CannotFold(f'{kind} is a subclass, which may compute something else than its base class in mmdet')
    for name, child in module.named_modules():
        if hooks := describe_hooks(child):
            raise CannotFold(f'{name or kind} has {hooks}')
    return _MAKERS[type(module)](module)


def check_two_layers(ffn: FFN) -> None:
    """Raises CannotFold unless an FFN of mmcv is ``x + fc2(act(fc1(x)))``, without LayerScale."""
    if ffn.num_fcs != 2 or not ffn.add_identity or not isinstance(ffn.gamma2, nn.Identity):
        raise CannotFold('its FFN does not have two layers and a residual connection, or has a LayerScale')


def _take_layers(theirs: nn.Module, make: Callable[[], Module], **layers: nn.Module) -> Module:
    """Makes a module of slab_det that holds the layers, parameters and buffers of a module of mmdet.

    Args:
        theirs: The module of mmdet.
        make: Makes slab_det's module, with layers of its own, on the meta device: no weights are initialised.
        layers: Layers that have another name in ``theirs``, or are slab_det's.

    Raises:
        AttributeError: If ``theirs`` lacks a layer of slab_det's module.
    """
    with torch.device('meta'):
        own = make()
    own.training = theirs.training
    tensors = (*own.named_parameters(recurse=False), *own.named_buffers(recurse=False))
    for name, part in (*own.named_children(), *tensors):
        if type(part) is nn.Identity:
            # Instead of a norm that mmdet's module does not have.
            part.training = theirs.training
        else:
            setattr(own, name, layers[name] if name in layers else getattr(theirs, name))
    return own


def _own_window_attention(attn: ShiftWindowMSA) -> ShiftedWindowAttention:
    theirs = attn.w_msa
    if type(theirs) is not WindowMSA:
        raise CannotFold(f'its attention is a {type(theirs).__name__}')
    options = dict(attn_drop_rate=theirs.attn_drop.p, qk_scale=theirs.scale)
    make = partial(SoftmaxWindowAttention, theirs.embed_dims, theirs.num_heads, attn.window_size, **options)
    w_msa = _take_layers(theirs, make)
    make = partial(ShiftedWindowAttention, w_msa, attn.shift_size, drop_path_rate=0.0)
    return _take_layers(attn, make, w_msa=w_msa)


def _own_map_attention(attn: SpatialReductionAttention) -> SoftmaxMapAttention:
    if not attn.batch_first:
        raise CannotFold('the inputs of its attention are not batch first')
    options = dict(sr_ratio=attn.sr_ratio, attn_drop_rate=attn.attn.dropout)
    make = partial(SoftmaxMapAttention, attn.embed_dims, attn.num_heads, **options)
    return _take_layers(attn, make, drop=attn.dropout_layer)


def _own_ffn(ffn: FFN | MixFFN) -> LinearFFN:
    kind = LinearFFN
    if isinstance(ffn, FFN):
        check_two_layers(ffn)
    else:
        kind = partial(ConvFFN, use_conv=len(ffn.layers) == 6)
    # Whatever the activation: it is one of the layers.
    make = partial(kind, ffn.embed_dims, ffn.feedforward_channels, dict(type='GELU'))
    return _take_layers(ffn, make, drop_path=ffn.dropout_layer)


def _own_block(block: SwinBlock | PVTEncoderLayer) -> Block:
    own = {}
    for name in ('attn', 'ffn'):
        part = block.get_submodule(name)
        # A part may have become slab_det's before, while the other one was still another library's.
        if type(part) not in (ShiftedWindowAttention, SoftmaxMapAttention):
            make = _PART_MAKERS.get(type(part))
            if make is None:
                raise CannotFold(f'its {name} is a {type(part).__name__}')
            part = make(part)
        own[name] = part
    make = partial(Block, **own, norm_cfg=dict(type='LN'), with_cp=getattr(block, 'with_cp', False))
    return _take_layers(block, make, **own)


def _own_merging(merging: MmdetPatchMerging) -> PatchMerging:
    sampler, padding = merging.sampler, merging.adap_padding
    stride, _ = sampler.stride
    is_corner = padding is not None and padding.padding == 'corner' and sampler.padding == (0, 0)
    is_square = sampler.stride == sampler.kernel_size == (stride, stride) and sampler.dilation == (1, 1)
    if not is_corner or not is_square:
        raise CannotFold('it does not merge square blocks of tokens, padded at the bottom and on the right')
    norm_cfg = dict(type='LN') if merging.norm else None
    return _take_layers(merging, partial(PatchMerging, merging.in_channels, merging.out_channels, stride, norm_cfg))


# FFNs are adopted with their block only: alone, they are called with other arguments.
_MAKERS: dict[type[nn.Module], Callable] = {
    SwinBlock: _own_block,
    PVTEncoderLayer: _own_block,
    ShiftWindowMSA: _own_window_attention,
    SpatialReductionAttention: _own_map_attention,
    MmdetPatchMerging: _own_merging,
}
_PART_MAKERS = {**_MAKERS, FFN: _own_ffn, MixFFN: _own_ffn}


def replace_layers(module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replaces each submodule by the layer that ``replacement`` returns, in place; None keeps the submodule.

    A layer with hooks stays: its replacement would not call them.
    """
    for name, child in module.named_children():
        new = None if any(map(describe_hooks, child.modules())) else replacement(child)
        if new is None:
            replace_layers(child, replacement)
        else:
            setattr(module, name, new.train(child.training))
