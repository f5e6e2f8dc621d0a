"""Hidden channels of mmdet's heads, for :func:`slab_det.absorb`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import RetinaHead, RPNHead
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead, Shared2FCBBoxHead, Shared4Conv1FCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from torch import nn

from slab_det.norms.folds import Channels, register_folds


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
    if not all(isinstance(conv, ConvModule) and conv.order[0] == 'conv' and not conv.with_norm for conv in convs):
        return
    names = [f'{tower}.{i}' for i in range(len(convs))]
    nexts = [(f'{name}.conv',) for name in names[1:]] + [tuple(readers)]
    for conv, name, reader in zip(convs, names, nexts, strict=True):
        if reader:
            between = (f'{name}.activate',) if conv.with_activation else ()
            yield Channels(name, (f'{name}.conv',), reader, between)


def _retina_channels(head: RetinaHead) -> Iterator[Channels]:
    yield from _tower_channels(head, 'cls_convs', ('retina_cls',))
    yield from _tower_channels(head, 'reg_convs', ('retina_reg',))


register_folds(RPNHead, hidden_channels=_rpn_channels)
register_folds(ConvFCBBoxHead, Shared2FCBBoxHead, Shared4Conv1FCBBoxHead, hidden_channels=_box_head_channels)
# The last convolution is read by a transposed convolution, and keeps its channels.
register_folds(FCNMaskHead, hidden_channels=lambda head: _tower_channels(head, 'convs'))
register_folds(RetinaHead, hidden_channels=_retina_channels)
