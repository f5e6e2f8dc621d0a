"""Norms and attention; the norms are registered in mmengine's MODELS."""

from slab_det.norms.base import OfflineNorm
from slab_det.norms.moving_norm import MABN, PowerNorm
from slab_det.norms.repbn import PRepBN, RepBN, set_gamma
from slab_det.norms.token_bn import TokenBN
from slab_det.norms.unified_norm import UN

__all__ = ['MABN', 'OfflineNorm', 'PRepBN', 'PowerNorm', 'RepBN', 'TokenBN', 'UN', 'set_gamma']
