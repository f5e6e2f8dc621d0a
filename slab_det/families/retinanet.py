"""RetinaNet: a dense head with sigmoid scores of each class of each anchor."""

from collections.abc import Iterator

from mmdet.models.dense_heads import RetinaHead

from slab_det.families.channels import tower_channels, tower_inputs
from slab_det.families.dense import Dense
from slab_det.norms.folds import Channels, register_folds


class RetinaNet(Dense):
    """See :class:`Dense`, and Lin et al., ICCV 2017."""

    name = 'retinanet'
    heads = absorbed = (RetinaHead,)
    predictors = 'retina_cls', 'retina_reg'


def _channels(head: RetinaHead) -> Iterator[Channels]:
    yield from tower_channels(head, 'cls_convs', ('retina_cls',))
    yield from tower_channels(head, 'reg_convs', ('retina_reg',))


register_folds(RetinaHead, hidden_channels=_channels, input_layers=tower_inputs)
