"""FCOS: a dense head that predicts the distances from a point to the sides of its box, and a centerness."""

from collections.abc import Iterator

from mmdet.models.dense_heads import FCOSHead

from slab_det.families.channels import tower_channels, tower_inputs
from slab_det.families.dense import Dense
from slab_det.norms.folds import Channels, register_folds


class FCOS(Dense):
    """See :class:`Dense`, and Tian et al., ICCV 2019."""

    name = 'fcos'
    heads = absorbed = (FCOSHead,)
    predictors = 'conv_cls', 'conv_reg', 'conv_centerness'
    has_points = True
    lowers_scores = True


def _channels(head: FCOSHead) -> Iterator[Channels]:
    readers = dict(cls_convs=['conv_cls'], reg_convs=['conv_reg'])
    readers['reg_convs' if head.centerness_on_reg else 'cls_convs'].append('conv_centerness')
    for tower, layers in readers.items():
        yield from tower_channels(head, tower, layers)


register_folds(FCOSHead, hidden_channels=_channels, input_layers=tower_inputs)
