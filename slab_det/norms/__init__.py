"""The norms, each one affine map per channel at inference; they are registered in mmengine's MODELS."""

from slab_det.norms.base import ChannelAffine, OfflineNorm, named_offline_norms, skipped_batches
from slab_det.norms.moving_norm import MABN, PowerNorm
from slab_det.norms.quadratic import QuadraticNorm, named_quadratic_norms
from slab_det.norms.repbn import PRepBN, RepBN, named_progressive_norms, set_gamma
from slab_det.norms.token_bn import TokenBN
from slab_det.norms.unified_norm import UN

__all__ = [
    'MABN',
    'ChannelAffine',
    'OfflineNorm',
    'PRepBN',
    'PowerNorm',
    'QuadraticNorm',
    'RepBN',
    'TokenBN',
    'UN',
    'named_offline_norms',
    'named_progressive_norms',
    'named_quadratic_norms',
    'set_gamma',
    'skipped_batches',
]
