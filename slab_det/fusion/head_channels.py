"""Hidden channels of mmdet's heads, for :func:`slab_det.absorb`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import ATSSHead, FCOSHead, RetinaHead, RPNHead, RTMDetSepBNHead
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead, Shared2FCBBoxHead, Shared4Conv1FCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from torch import nn

from slab_det.norms.folds import CannotFold, Channels, register_folds


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


register_folds(RPNHead, hidden_channels=_rpn_channels)
register_folds(ConvFCBBoxHead, Shared2FCBBoxHead, Shared4Conv1FCBBoxHead, hidden_channels=_box_head_channels)
register_folds(FCNMaskHead, hidden_channels=_mask_head_channels)
register_folds(RetinaHead, hidden_channels=_retina_channels)
register_folds(ATSSHead, hidden_channels=_atss_channels)
register_folds(FCOSHead, hidden_channels=_fcos_channels)
register_folds(RTMDetSepBNHead, hidden_channels=_rtmdet_channels)
