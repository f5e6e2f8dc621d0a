"""Norms and attention; the norms are registered in mmengine's MODELS."""
from .moving_norm import MABN, PowerNorm
from .offline_norm import OfflineNorm
from .repbn import PRepBN, RepBN, set_gamma
from .token_bn import TokenBN
from .unified_norm import UN

__all__ = ['MABN', 'OfflineNorm', 'PRepBN', 'PowerNorm', 'RepBN', 'TokenBN', 'UN', 'set_gamma']
