"""The SLAB authors' Swin and PVT layouts (github.com/xinghaochen/SLAB), classification and detection.

A progressive norm ``n`` is stored as ``n.norm1.*`` (LayerNorm), ``n.norm2.bn.*`` and ``n.norm2.alpha`` (RepBN and its
eta) and the counters ``n.warm``, ``n.iter``, ``n.total_step``; a plain RepBN as ``n.bn.*`` and ``n.alpha``.
All else is as in Microsoft's Swin or the official PVT; linear attention adds ``attn.positional_encoding`` and
``attn.dwc``, and their PVT has no class token.
"""
from __future__ import annotations

import torch

from .pvt_layout import is_official_pvt, to_native_pvt
from .swin_layout import is_foreign_swin, to_native_swin
from .weight import CheckpointFormat, Weight, Weights


def matches(keys: set[str]) -> bool:
    return (is_foreign_swin(keys) or is_official_pvt(keys)) and any(
        key.endswith(('.total_step', '.alpha')) for key in keys)


def convert(weights: Weights) -> Weights:
    weights = _plain_repbn(_progressive_norms(weights))
    return to_native_pvt(weights) if is_official_pvt(weights) else to_native_swin(weights)


def _progressive_norms(weights: Weights) -> Weights:
    # The counters tell them apart: a block of plain RepBNs also holds `norm1.…` and `norm2.bn.…`.
    norms = {key.removesuffix('.total_step') for key in weights if key.endswith('.total_step')}
    result = dict(weights)
    for norm in norms:
        total_step = result.pop(f'{norm}.total_step')
        remaining, warm = (float(weight.value) if weight is not None else 0.0 for weight in (
            result.pop(f'{norm}.iter', None), result.pop(f'{norm}.warm', None)))
        gamma = gamma_of_counters(remaining, float(total_step.value), warm)
        result[f'{norm}._gamma'] = total_step.changed(torch.tensor(gamma, dtype=torch.float64), 'gamma from counters')
        _rename(result, f'{norm}.norm1.', f'{norm}.ln.')
        _rename(result, f'{norm}.norm2.bn.', f'{norm}.repbn.')
        _rename(result, f'{norm}.norm2.alpha', f'{norm}.repbn.eta')
    return result


def _plain_repbn(weights: Weights) -> Weights:
    result = dict(weights)
    for norm in {key.removesuffix('.alpha') for key in weights if key.endswith('.alpha')}:
        _rename(result, f'{norm}.bn.', f'{norm}.')
        _rename(result, f'{norm}.alpha', f'{norm}.eta')
    return result


def gamma_of_counters(remaining: float, total: float, warm: float) -> float:
    """gamma of the released code: ``iter`` counts down from ``total_step`` once ``warm`` has counted down to 0."""
    if warm > 0:
        return 1.0
    # Trained with T = 0, as Table A1 prints for Swin-T; the released code divides 0 by 0.
    if total <= 0:
        return 0.0
    return min(max(remaining / total, 0.0), 1.0)


def _rename(weights: dict[str, Weight], old_prefix: str, new_prefix: str) -> None:
    for key in [key for key in weights if key.startswith(old_prefix)]:
        weights[new_prefix + key[len(old_prefix):]] = weights.pop(key)


FORMAT = CheckpointFormat('slab_official', matches, convert)
