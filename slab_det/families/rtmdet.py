"""RTMDet: a dense head that predicts the distances from a point to the sides of its box."""

from mmdet.models.dense_heads import RTMDetHead, RTMDetSepBNHead

from slab_det.families.dense import Dense


class RTMDet(Dense):
    """See :class:`Dense`, and Lyu et al., arXiv 2212.07784."""

    name = 'rtmdet'
    # Each level of the second has norms of its own, as in all configs of mmdet.
    heads = RTMDetHead, RTMDetSepBNHead
    predictors = 'rtm_cls', 'rtm_reg', 'rtm_obj'
    has_points = True
