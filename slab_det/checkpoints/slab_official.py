"""The SLAB authors' Swin and PVT layouts (github.com/xinghaochen/SLAB), classification and detection.

A progressive norm ``n`` is stored as ``n.norm1.*`` (LayerNorm), ``n.norm2.bn.*`` and ``n.norm2.alpha`` (RepBN and its
eta) and the counters ``n.warm``, ``n.iter``, ``n.total_step``; a plain RepBN as ``n.bn.*`` and ``n.alpha``. Files
stripped of their counters exist: such a norm has gamma 0, as the released code evaluates ``norm2`` alone at the end.
All else is as in Microsoft's Swin or the official PVT; linear attention adds ``attn.positional_encoding`` and
``attn.dwc``, and their PVT has no class token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from slab_det.checkpoints.pvt_layout import is_official_pvt, to_native_pvt
from slab_det.checkpoints.swin_layout import is_foreign_swin, to_native_swin
from slab_det.checkpoints.weight import CheckpointFormat, Weight, Weights
from slab_det.runtime.errors import CheckpointError

NO_COUNTERS = 'gamma 0 for want of counters'


def matches(keys: set[str]) -> bool:
    return (is_foreign_swin(keys) or is_official_pvt(keys)) and bool(
        any(key.endswith('.total_step') for key in keys) or _repbn_names(keys)
    )


def convert(weights: Weights) -> Weights:
    weights = _plain_repbn(_progressive_norms(weights))
    return to_native_pvt(weights) if is_official_pvt(weights) else to_native_swin(weights)


def _progressive_norms(weights: Weights) -> Weights:
    result = dict(weights)
    for norm in sorted(_progressive_names(weights)):
        result[f'{norm}._gamma'] = _pop_gamma(norm, result)
        _rename(result, f'{norm}.norm1.', f'{norm}.ln.')
        _rename(result, f'{norm}.norm2.bn.', f'{norm}.repbn.')
        _rename(result, f'{norm}.norm2.alpha', f'{norm}.repbn.eta')
    return result


def _progressive_names(keys: Iterable[str]) -> set[str]:
    keys = set(keys)
    counted = {key.removesuffix('.total_step') for key in keys if key.endswith('.total_step')}
    candidates = {name.removesuffix('.norm2') for name in _repbn_names(keys) if name.endswith('.norm2')} - counted
    # A block whose norm2 is a plain RepBN also holds `norm1.…` and `norm2.bn.…`, and besides them attention and MLP.
    parts = {name: set() for name in candidates if f'{name}.norm1.weight' in keys}
    for key in keys:
        components = key.split('.')
        for length in range(1, len(components)):
            name = '.'.join(components[:length])
            if name in parts:
                parts[name].add(components[length])
    return counted | {name for name, found in parts.items() if found <= {'norm1', 'norm2', 'iter', 'warm'}}


def _pop_gamma(norm: str, weights: dict[str, Weight]) -> Weight:
    """gamma of a progressive norm, whose counters leave ``weights``."""
    total_step, *others = (weights.pop(f'{norm}.{name}', None) for name in ('total_step', 'iter', 'warm'))
    remaining, warm = (0.0 if weight is None else float(weight.value) for weight in others)
    if total_step is not None:
        gamma, change = gamma_of_counters(remaining, float(total_step.value), warm), 'gamma from counters'
    elif remaining > 0 or warm > 0:
        raise CheckpointError(
            f'{norm}.total_step is missing, and the decay is not finished (iter {remaining:g}, warm '
            f'{warm:g}): gamma cannot be known; get the whole checkpoint'
        )
    else:
        gamma, change = 0.0, NO_COUNTERS
    stands_for = total_step or weights[f'{norm}.norm1.weight']
    return stands_for.changed(torch.tensor(gamma, dtype=torch.float64), change)


def _repbn_names(keys: Iterable[str]) -> set[str]:
    # DyT has an alpha too, but no BatchNorm beside it.
    keys = set(keys)
    return {
        key.removesuffix('.alpha')
        for key in keys
        if key.endswith('.alpha') and f'{key.removesuffix("alpha")}bn.weight' in keys
    }


def _note_no_counters(model: nn.Module, weights: Weights) -> list[str]:
    count = sum(weight.change == NO_COUNTERS for weight in weights.values())
    if not count:
        return []
    return [
        f'{count} progressive norms have no counters in the file: taken as finished, gamma 0, which is what the '
        'released code evaluates at the end'
    ]


def _plain_repbn(weights: Weights) -> Weights:
    result = dict(weights)
    for norm in _repbn_names(weights):
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
        weights[new_prefix + key[len(old_prefix) :]] = weights.pop(key)


FORMAT = CheckpointFormat('slab_official', matches, convert, _note_no_counters)
