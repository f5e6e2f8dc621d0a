"""Norms and attention; the norms are registered in mmengine's MODELS."""
from .offline_norm import OfflineNorm
from .repbn import PRepBN, RepBN, set_gamma
from .token_bn import TokenBN

__all__ = ['OfflineNorm', 'PRepBN', 'RepBN', 'TokenBN', 'set_gamma']
