"""Hidden channels of mmdet's heads, for :func:`slab_det.absorb`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import ATSSHead, FCOSHead, RetinaHead, RPNHead, RTMDetSepBNHead
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
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead, Shared2FCBBoxHead, Shared4Conv1FCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from torch import nn

from slab_det.norms.folds import CannotFold, Channels, find_rule, register_folds


def _rpn_channels(head: RPNHead) -> list[Channels]:
    return [Channels('rpn_conv', ('rpn_conv',), ('rpn_cls', 'rpn_reg'))] if isinstance(head.rpn_conv, nn.Conv2d) else []


def _box_head_channels(head: ConvFCBBoxHead) -> Iterator[Channels]:
    """The outputs of each shared linear layer; separate branches of classes and boxes keep their channels."""
    if [*head.cls_convs, *head.cls_fcs, *head.reg_convs, *head.reg_fcs] or not (head.with_cls and head.with_reg):
        return
    names = [f'shared_fcs.{i}' for i in range(len(head.shared_fcs))]
    for i, name in enumerate(names):
        yield Channels(name, (name,), (names[i + 1],) if i + 1 < len(names) else ('fc_cls', 'fc_reg'))


def _tower_channels(head: nn.Module, tower: str, readers: Sequence[str] = ()) -> Iterator[Channels]:
    """The outputs of each convolution of a tower, which the next one reads, or at the end ``readers``."""
    convs = [*head.get_submodule(tower)]
    if not all(isinstance(conv, ConvModule) and conv.order[0] == 'conv' for conv in convs):
        return
    names = [f'{tower}.{i}' for i in range(len(convs))]
    nexts = [(f'{name}.conv',) for name in names[1:]] + [tuple(readers)]
    for conv, name, reader in zip(convs, names, nexts, strict=bool(convs)):
        if reader:
            yield Channels(name, (f'{name}.conv',), reader, tuple(_between(conv, name)))


def _between(conv: ConvModule, name: str) -> Iterator[str]:
    """The norm and the activation of a convolution."""
    if conv.with_norm:
        yield f'{name}.{conv.norm_name}'
    if conv.with_activation:
        yield f'{name}.activate'


def _mask_head_channels(head: FCNMaskHead) -> Iterator[Channels]:
    """The outputs of each convolution, and of the transposed convolution that enlarges the map."""
    if head.upsample_method != 'deconv':
        yield from _tower_channels(head, 'convs')
        return
    yield from _tower_channels(head, 'convs', ('upsample',))
    yield Channels('upsample', ('upsample',), ('conv_logits',), ('relu',))


def _map_channels(model: SingleStageDetector | TwoStageDetector) -> Iterator[Channels]:
    """The outputs of an FPN, which all heads read."""
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
    neck = model.neck if model.with_neck else None
    layers = [rule() for rule in rules] if all(rules) else []
    if type(neck) is not FPN or not layers or not all(layers):
        return
    readers = [f'{head}.{layer}' for head, names in zip(heads, layers, strict=True) for layer in names]
    extra = [f'neck.fpn_convs.{i}.conv' for i in range(len(neck.lateral_convs), len(neck.fpn_convs))]
    is_plain = not any(conv.with_norm or conv.with_activation for conv in neck.fpn_convs)
    # A ReLU of a linear combination is none of ReLUs.
    if is_plain and not (neck.relu_before_extra_convs and len(extra) > 1):
        # The first of the extra levels reads the last output, or what comes before.
        readers += extra if neck.add_extra_convs == 'on_output' else extra[1:]
        writers = [f'neck.fpn_convs.{i}.conv' for i in range(len(neck.fpn_convs))]
        yield Channels('neck', tuple(writers), tuple(readers), tuple(extractors), maps=True)


def _parts(model: nn.Module, name: str) -> list[str]:
    module = model.get_submodule(name)
    return [f'{name}.{i}' for i in range(len(module))] if isinstance(module, nn.ModuleList) else [name]


def _box_head_input(head: ConvFCBBoxHead) -> tuple[str, ...]:
    if head.num_shared_convs:
        return ('shared_convs.0.conv',)
    return ('shared_fcs.0',) if head.num_shared_fcs else ()


def _tower_inputs(head: nn.Module) -> tuple[str, ...]:
    return ('cls_convs.0.conv', 'reg_convs.0.conv') if len(head.cls_convs) else ()


def _rtmdet_inputs(head: RTMDetSepBNHead) -> tuple[str, ...]:
    whole = head.share_conv and not head.use_depthwise and len(head.cls_convs[0])
    return ('cls_convs.0.0.conv', 'reg_convs.0.0.conv') if whole else ()


def _retina_channels(head: RetinaHead) -> Iterator[Channels]:
    yield from _tower_channels(head, 'cls_convs', ('retina_cls',))
    yield from _tower_channels(head, 'reg_convs', ('retina_reg',))


def _atss_channels(head: ATSSHead) -> Iterator[Channels]:
    yield from _tower_channels(head, 'cls_convs', ('atss_cls',))
    yield from _tower_channels(head, 'reg_convs', ('atss_reg', 'atss_centerness'))


def _fcos_channels(head: FCOSHead) -> Iterator[Channels]:
    readers = dict(cls_convs=['conv_cls'], reg_convs=['conv_reg'])
    readers['reg_convs' if head.centerness_on_reg else 'cls_convs'].append('conv_centerness')
    for tower, layers in readers.items():
        yield from _tower_channels(head, tower, layers)


def _rtmdet_channels(head: RTMDetSepBNHead) -> Iterator[Channels]:
    """The levels share the convolutions of the towers; each has its own batch norms and predictors."""
    levels = range(len(head.cls_convs))
    if not head.share_conv or head.use_depthwise:
        raise CannotFold('its levels do not share whole convolutions')
    boxes = ['rtm_reg', 'rtm_obj'] if head.with_objectness else ['rtm_reg']
    for tower, predictors in (('cls_convs', ['rtm_cls']), ('reg_convs', boxes)):
        convs = [*head.get_submodule(tower)[0]]
        for i in range(len(convs)):
            last = i + 1 == len(convs)
            readers = [f'{name}.{level}' for level in levels for name in predictors]
            between = [name for n in levels for name in _between(head.get_submodule(tower)[n][i], f'{tower}.{n}.{i}')]
            yield Channels(
                f'{tower}.0.{i}',
                (f'{tower}.0.{i}.conv',),
                tuple(readers) if last else (f'{tower}.0.{i + 1}.conv',),
                tuple(between),
                levels=len(levels) if last else 1,
            )


register_folds(RPNHead, hidden_channels=_rpn_channels, input_layers=lambda head: ('rpn_conv',))
register_folds(
    ConvFCBBoxHead,
    Shared2FCBBoxHead,
    Shared4Conv1FCBBoxHead,
    hidden_channels=_box_head_channels,
    input_layers=_box_head_input,
)
register_folds(
    FCNMaskHead, hidden_channels=_mask_head_channels, input_layers=lambda head: ('convs.0.conv',) * (head.num_convs > 0)
)
for kind, rule in ((RetinaHead, _retina_channels), (ATSSHead, _atss_channels), (FCOSHead, _fcos_channels)):
    register_folds(kind, hidden_channels=rule, input_layers=_tower_inputs)
register_folds(RTMDetSepBNHead, hidden_channels=_rtmdet_channels, input_layers=_rtmdet_inputs)
register_folds(FasterRCNN, MaskRCNN, CascadeRCNN, RetinaNet, ATSS, FCOS, RTMDet, hidden_channels=_map_channels)
