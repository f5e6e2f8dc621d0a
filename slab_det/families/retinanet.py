"""RetinaNet: a dense head with sigmoid scores of each class of each anchor."""

from mmdet.models.dense_heads import RetinaHead

from slab_det.families.dense import Dense


class RetinaNet(Dense):
    """See :class:`Dense`, and Lin et al., ICCV 2017."""

    name = 'retinanet'
    heads = (RetinaHead,)
    predictors = 'retina_cls', 'retina_reg'
