"""FCOS: a dense head that predicts the distances from a point to the sides of its box, and a centerness."""

from mmdet.models.dense_heads import FCOSHead

from slab_det.families.dense import Dense


class FCOS(Dense):
    """See :class:`Dense`, and Tian et al., ICCV 2019."""

    name = 'fcos'
    heads = (FCOSHead,)
    predictors = 'conv_cls', 'conv_reg', 'conv_centerness'
    has_points = True
    lowers_scores = True
