"""Hidden channels that heads have in common: towers of convolutions, and the maps of an FPN that all heads read.

Each family's file says which channels its heads have, for :func:`slab_det.absorb`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmcv.cnn import ConvModule
from mmdet.models.detectors import (
    ATSS,
    FCOS,
    CascadeRCNN,
    FasterRCNN,
    MaskRCNN,
    RetinaNet,
    RTMDet,
    SingleStageDetector,
    TwoStageDetector,
)
from mmdet.models.necks import FPN
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from torch import nn

from slab_det.norms.folds import Channels, find_rule, register_folds


def tower_channels(head: nn.Module, tower: str, readers: Sequence[str] = ()) -> Iterator[Channels]:
    """The outputs of each convolution of a tower, which the next one reads, or at the end ``readers``."""
    convs = [*head.get_submodule(tower)]
    if not convs or not all(isinstance(conv, ConvModule) and conv.order[0] == 'conv' for conv in convs):
        return
    names = [f'{tower}.{i}' for i in range(len(convs))]
    nexts = [(f'{name}.conv',) for name in names[1:]] + [tuple(readers)]
    for conv, name, reader in zip(convs, names, nexts, strict=True):
        if reader:
            yield Channels(name, (f'{name}.conv',), reader, tuple(layers_between(conv, name)))


def layers_between(conv: ConvModule, name: str) -> Iterator[str]:
    """The norm and the activation of a convolution."""
    if conv.with_norm:
        yield f'{name}.{conv.norm_name}'
    if conv.with_activation:
        yield f'{name}.activate'


def tower_inputs(head: nn.Module) -> tuple[str, ...]:
    """The layers of a dense head with two towers that read the maps."""
    return ('cls_convs.0.conv', 'reg_convs.0.conv') if len(head.cls_convs) else ()


def _map_channels(model: SingleStageDetector | TwoStageDetector) -> Iterator[Channels]:
    """The outputs of an FPN, which all heads read."""
    if not model.with_neck or type(model.neck) is not FPN:
        return
    names = ('bbox_head',)
    if isinstance(model, TwoStageDetector):
        # Other RoI heads have more layers that read the maps.
        if type(model.roi_head) not in (StandardRoIHead, CascadeRoIHead) or model.roi_head.with_shared_head:
            return
        names = ('rpn_head', 'roi_head.bbox_head') + ('roi_head.mask_head',) * model.with_mask
    extractors = [f'{name.removesuffix("head")}roi_extractor' for name in names[1:]]
    # A cascade has a head for each stage.
    heads, extractors = ([part for name in group for part in _parts(model, name)] for group in (names, extractors))
    rules = [find_rule(model.get_submodule(head), 'input_layers') for head in heads]
    neck, layers = model.neck, [rule() for rule in rules] if all(rules) else []
    if not layers or not all(layers):
        return
    readers = [f'{head}.{layer}' for head, names in zip(heads, layers, strict=True) for layer in names]
    extra = [f'neck.fpn_convs.{i}.conv' for i in range(len(neck.lateral_convs), len(neck.fpn_convs))]
    is_plain = not any(conv.with_norm or conv.with_activation for conv in neck.fpn_convs)
    # Absorption combines channels linearly, and the ReLU of a combination is no combination of their ReLUs.
    if is_plain and not (neck.relu_before_extra_convs and len(extra) > 1):
        # The first of the extra levels reads the last output, or what comes before.
        readers += extra if neck.add_extra_convs == 'on_output' else extra[1:]
        writers = [f'neck.fpn_convs.{i}.conv' for i in range(len(neck.fpn_convs))]
        yield Channels('neck', tuple(writers), tuple(readers), tuple(extractors), maps=True)


def _inner_channels(neck: FPN) -> Iterator[Channels]:
    """The maps that an FPN adds up, from coarse to fine, before its output convolutions read them."""
    levels, convs = len(neck.lateral_convs), [*neck.lateral_convs]
    is_plain = not any(conv.with_norm or conv.with_activation for conv in convs)
    # Outputs behind a norm or an activation are read from the convolution all the same.
    is_first = all(conv.order[0] == 'conv' for conv in neck.fpn_convs)
    if is_plain and is_first and levels > 1 and neck.add_extra_convs != 'on_lateral':
        writers, readers = (tuple(f'{part}.{i}.conv' for i in range(levels)) for part in ('lateral_convs', 'fpn_convs'))
        yield Channels('lateral_convs', writers, readers, levels=levels, maps=True)


def _parts(model: nn.Module, name: str) -> list[str]:
    module = model.get_submodule(name)
    return [f'{name}.{i}' for i in range(len(module))] if isinstance(module, nn.ModuleList) else [name]


register_folds(FPN, hidden_channels=_inner_channels)
register_folds(FasterRCNN, MaskRCNN, CascadeRCNN, RetinaNet, ATSS, FCOS, RTMDet, hidden_channels=_map_channels)
