"""ATSS: the head of RetinaNet with a centerness, by which it multiplies scores."""

from mmdet.models.dense_heads import ATSSHead

from slab_det.families.dense import Dense


class ATSS(Dense):
    """See :class:`Dense`, and Zhang et al., CVPR 2020."""

    name = 'atss'
    heads = (ATSSHead,)
    predictors = 'atss_cls', 'atss_reg', 'atss_centerness'
    lowers_scores = True
