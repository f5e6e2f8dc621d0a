"""The norms, each one affine map per channel at inference; they are registered in mmengine's MODELS."""

from slab_det.norms.base import (
    ChannelAffine,
    OfflineNorm,
    check_norm_weights,
    named_norms,
    named_offline_norms,
)
from slab_det.norms.batch_norm import RepBN, TokenBN
from slab_det.norms.progressive import PRepBN, named_progressive_norms, set_gamma
from slab_det.norms.quadratic import MABN, UN, PowerNorm, QuadraticNorm
