"""Replaces mmdet's transformer blocks with slab_det's, and recognises the layers that deploy can replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from mmcv.cnn import Linear
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer
from mmdet.models.backbones.swin import SwinBlock
from torch import nn

from slab_det.attention import MapAttention, ShiftedWindowAttention
from slab_det.backbones.blocks import Block, ConvFFN, LinearFFN
from slab_det.fusion.folds import CannotFold, find_hooks, find_rule
from slab_det.fusion.fuse import replace_module
from slab_det.fusion.stock_mmdet import is_two_layers

ACTIVATIONS = {nn.GELU: 'gelu', nn.ReLU: 'relu'}
OWN_FFNS = {FFN: LinearFFN, MixFFN: ConvFFN}


def replace_stock_blocks(backbone: nn.Module) -> None:
    """Replaces mmdet's Swin and PVT blocks with slab_det's, in place; a block with modified layers stays."""
    for name, block in known_blocks(backbone, {SwinBlock, PVTEncoderLayer}):
        try:
            replace_module(backbone, name, _own_block(block))
        except CannotFold:
            continue


def known_blocks(backbone: nn.Module, kinds: set[type]) -> list[tuple[str, nn.Module]]:
    """Names and modules of the blocks of exactly these classes; leaves out subclasses and blocks with hooks."""
    return [
        (name, block)
        for name, block in backbone.named_modules()
        if type(block) in kinds and not any(map(find_hooks, block.modules()))
    ]


def _own_block(block: SwinBlock | PVTEncoderLayer) -> Block:
    """Builds our Block from the layers of an mmdet block, for inference; raises CannotFold if they are modified."""
    replace, kind = find_rule(block.attn, 'replace'), OWN_FFNS.get(type(block.ffn))
    attn = replace() if replace else block.attn
    is_known_ffn = kind is not LinearFFN or is_two_layers(block.ffn)
    if not isinstance(attn, ShiftedWindowAttention | MapAttention) or kind is None or not is_known_ffn:
        raise CannotFold("its attention or its FFN is not mmdet's own")
    # The meta device skips weight initialisation; every layer comes from the mmdet block.
    with torch.device('meta'):
        own = Block(attn, LinearFFN(1, 1, dict(type='GELU')), dict(type='LN'))
        own.ffn = kind(1, 1, dict(type='GELU'))
    own.norm1, own.norm2, own.ffn.layers = block.norm1, block.norm2, block.ffn.layers
    return own.eval()


class FFNLayers(NamedTuple):
    """The layers of an FFN, ``fc2(act(fc1(x)))``.

    Attributes:
        fc1: First layer, linear or a 1x1 convolution.
        activation: 'gelu' or 'relu'.
        fc2: Second layer.
    """

    fc1: nn.Module
    activation: str
    fc2: nn.Module


def known_ffn(ffn: nn.Module) -> FFNLayers | None:
    """The layers of an FFN; None if it has other layers too, such as a convolution or a norm."""
    if type(ffn) not in (LinearFFN, ConvFFN) or not isinstance(ffn.norm, nn.Identity):
        return None
    fc1, activation, fc2 = map(ffn.get_submodule, (ffn.fc1, ffn.activation, ffn.fc2))
    if type(ffn) is LinearFFN and not (is_plain_linear(fc1) and is_plain_linear(fc2)):
        return None
    if type(activation) not in ACTIVATIONS or getattr(activation, 'approximate', 'none') != 'none':
        return None
    return FFNLayers(fc1, ACTIVATIONS[type(activation)], fc2)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether ``layer`` computes ``x weight^T + bias`` and nothing else."""
    # Exact classes: a subclass may compute its weight, or add something.
    return type(layer) in (nn.Linear, Linear) and 'weight' in layer._parameters


def replace_layers(module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replaces each submodule by the layer that ``replacement`` returns, in place; None keeps the submodule.

    A layer with hooks stays: its replacement would not call them.
    """
    for name, child in module.named_children():
        new = None if any(map(find_hooks, child.modules())) else replacement(child)
        if new is None:
            replace_layers(child, replacement)
        else:
            setattr(module, name, new.train(child.training))
