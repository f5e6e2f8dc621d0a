"""ATSS: the head of RetinaNet with a centerness, by which it multiplies scores."""

from collections.abc import Iterator

from mmdet.models.dense_heads import ATSSHead

from slab_det.families.channels import tower_channels, tower_inputs
from slab_det.families.dense import Dense
from slab_det.norms.folds import Channels, register_folds


class ATSS(Dense):
    """See :class:`Dense`, and Zhang et al., CVPR 2020."""

    name = 'atss'
    heads = absorbed = (ATSSHead,)
    predictors = 'atss_cls', 'atss_reg', 'atss_centerness'
    lowers_scores = True


def _channels(head: ATSSHead) -> Iterator[Channels]:
    yield from tower_channels(head, 'cls_convs', ('atss_cls',))
    yield from tower_channels(head, 'reg_convs', ('atss_reg', 'atss_centerness'))


register_folds(ATSSHead, hidden_channels=_channels, input_layers=tower_inputs)
