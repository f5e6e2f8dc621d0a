"""RTMDet: a dense head that predicts the distances from a point to the sides of its box."""

from collections.abc import Iterator

from mmdet.models.dense_heads import RTMDetHead, RTMDetSepBNHead

from slab_det.families.channels import layers_between
from slab_det.families.dense import Dense
from slab_det.norms.folds import CannotFold, Channels, register_folds


class RTMDet(Dense):
    """See :class:`Dense`, and Lyu et al., arXiv 2212.07784."""

    name = 'rtmdet'
    # Each level of the second has norms of its own, as in all configs of mmdet.
    heads = RTMDetHead, RTMDetSepBNHead
    absorbed = (RTMDetSepBNHead,)
    predictors = 'rtm_cls', 'rtm_reg', 'rtm_obj'
    has_points = True


def _channels(head: RTMDetSepBNHead) -> Iterator[Channels]:
    """The levels share the convolutions of the towers; each has its own batch norms and predictors."""
    levels = range(len(head.cls_convs))
    if not head.share_conv or head.use_depthwise:
        raise CannotFold('its levels do not share whole convolutions')
    boxes = ['rtm_reg', 'rtm_obj'] if head.with_objectness else ['rtm_reg']
    for tower, predictors in (('cls_convs', ['rtm_cls']), ('reg_convs', boxes)):
        stacks = head.get_submodule(tower)
        count = len(stacks[0])
        for i in range(count):
            last = i + 1 == count
            readers = [f'{name}.{level}' for level in levels for name in predictors]
            between = [name for n in levels for name in layers_between(stacks[n][i], f'{tower}.{n}.{i}')]
            yield Channels(
                f'{tower}.0.{i}',
                (f'{tower}.0.{i}.conv',),
                tuple(readers) if last else (f'{tower}.0.{i + 1}.conv',),
                tuple(between),
                levels=len(levels) if last else 1,
            )


def _input_layers(head: RTMDetSepBNHead) -> tuple[str, ...]:
    whole = head.share_conv and not head.use_depthwise and len(head.cls_convs[0])
    return ('cls_convs.0.0.conv', 'reg_convs.0.0.conv') if whole else ()


register_folds(RTMDetSepBNHead, hidden_channels=_channels, input_layers=_input_layers)
