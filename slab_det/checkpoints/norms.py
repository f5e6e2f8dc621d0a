"""Fits the norms of a checkpoint to the norms of a model.

| checkpoint | model | what is loaded |
|---|---|---|
| same | same | all of it |
| LayerNorm | PRepBN | its LayerNorm branch, gamma 1 |
| RepBN or BatchNorm | PRepBN | its RepBN branch (eta = 0 for BatchNorm), gamma 0 |
| BatchNorm | RepBN | eta = 0 |
| LayerNorm | TokenBN, RepBN, UN, MABN, PowerNorm | weight and bias to start training; no statistics |
| UN, MABN, PowerNorm | another of them, or another window | weight, bias and running_var; averages begin anew |

Everything else is an error. A LayerNorm cannot hold statistics. UN, MABN and PowerNorm subtract no mean, and their
running_var is the mean of x^2. A TokenBN has no eta.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from slab_det.checkpoints.layouts import Weight, Weights
from slab_det.checkpoints.load_report import LoadReport
from slab_det.common.errors import CheckpointError, name_some
from slab_det.norms import OfflineNorm, PRepBN, QuadraticNorm, RepBN, TokenBN, named_norms

_AFFINE = {'weight', 'bias'}
_BATCH_NORM = _AFFINE | {'running_mean', 'running_var'}
KEYS_OF_KIND = {
    'LayerNorm': _AFFINE,
    'BatchNorm': _BATCH_NORM,
    'RepBN': _BATCH_NORM | {'eta'},
    'PRepBN': {'_gamma', *(f'ln.{key}' for key in _AFFINE), *(f'repbn.{key}' for key in (*_BATCH_NORM, 'eta'))},
}
# Keys of UN, MABN and PowerNorm that inference reads; their averages for training differ.
QUADRATIC_KEYS = _AFFINE | {'running_var'}
# (checkpoint's norm, model's norm): prefix of the weights in the model's norm, and values that the checkpoint lacks.
FITS = {
    ('LayerNorm', OfflineNorm): ('', {}),
    ('LayerNorm', PRepBN): ('ln.', {'_gamma': 1.0}),
    ('BatchNorm', TokenBN): ('', {}),
    ('BatchNorm', RepBN): ('', {'eta': 0.0}),
    ('BatchNorm', PRepBN): ('repbn.', {'repbn.eta': 0.0, '_gamma': 0.0}),
    ('RepBN', RepBN): ('', {}),
    ('RepBN', PRepBN): ('repbn.', {'_gamma': 0.0}),
    ('PRepBN', PRepBN): ('', {}),
}


def fit_norms(weights: Weights, model: nn.Module, report: LoadReport) -> Weights:
    """Converts the weights of every norm to the kind of norm that ``model`` has under the same name.

    ``report`` receives gammas, and keys that are missing or unused for a reason.

    Raises:
        CheckpointError: If a norm of the checkpoint cannot be converted to the model's.
    """
    fitted = dict(weights)
    for name, norm in named_norms(model, OfflineNorm, nn.LayerNorm):
        prefix, targets = f'{name}.', norm.state_dict()
        given = {key[len(prefix) :]: fitted.pop(key) for key in weights if key.startswith(prefix)}
        values = given
        if given and not _is_same(given, norm):
            values, reason = _convert(name, given, norm)
            report.missing.update({prefix + key: reason for key in targets if key not in values})
            taken = {weight.key for weight in values.values()}
            report.unused.update({weight.key: reason for weight in given.values() if weight.key not in taken})
        if '_gamma' in values:
            report.gammas[name] = float(values['_gamma'].value)
        fitted.update({prefix + key: weight for key, weight in values.items()})
    return fitted


def _is_same(given: Weights, norm: nn.Module) -> bool:
    """Whether ``norm`` can load the weights unchanged; decided by keys, so that norms unknown here load too."""
    targets = norm.state_dict()
    if isinstance(norm, nn.LayerNorm):
        return given.keys() <= targets.keys()
    # The buffers of a quadratic norm also depend on its window.
    any_shape = not isinstance(norm, QuadraticNorm)
    return given.keys() == targets.keys() and (
        any_shape or all(given[k].value.shape == targets[k].shape for k in given)
    )


def _convert(name: str, given: Weights, norm: nn.Module) -> tuple[Weights, str]:
    """Returns the weights that ``norm`` loads, and why other keys of the checkpoint and of ``norm`` are left out."""
    keys = {key for key in given if not key.endswith('num_batches_tracked')}
    if isinstance(norm, QuadraticNorm) and keys >= QUADRATIC_KEYS and 'running_mean' not in keys:
        return {key: given[key] for key in QUADRATIC_KEYS}, 'averages of another training'
    kind = next((kind for kind, expected in KEYS_OF_KIND.items() if keys == expected), None)
    if kind is None:
        raise CheckpointError(
            f'{name}: the checkpoint holds {", ".join(weight.key for weight in given.values())}: neither a complete '
            f'{type(norm).__name__}, as in the model, nor a complete {", ".join(KEYS_OF_KIND)}; give a checkpoint with '
            'all parameters and buffers, or set norm_cfg of the backbone to the norm of the checkpoint'
        )
    fit = next((FITS[kind, base] for base in type(norm).__mro__ if (kind, base) in FITS), None)
    if fit is None:
        suited = 'TokenBN' if kind == 'BatchNorm' else kind
        raise CheckpointError(
            f'{name}: the checkpoint holds a {kind}, which cannot become the {type(norm).__name__} of the model; set '
            f"norm_cfg (and out_norm_cfg for output norms) of the backbone to dict(type='{suited}')"
        )
    prefix, implied = fit
    fitted = {prefix + part: weight for part, weight in given.items()}
    first = next(iter(given.values()))
    for part, value in implied.items():
        change = f'{part.removeprefix("repbn.").strip("_")} {value:g} for {kind}'
        fitted[part] = Weight(torch.full_like(norm.state_dict()[part], value), first.key, change)
    return fitted, f'the checkpoint holds {kind}' + (': train before fusing' if kind == 'LayerNorm' else '')


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`slab_det.fuse` removed norms of this model, now or when its checkpoint was written."""
    return bool(_folded_norms(model))


def _folded_norms(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the keys of norms that fusion removed from ``model``."""
    report = getattr(model, 'fusion_report', None)
    return tuple(f'{fusion.norm}.' for fusion in report.norms if fusion.outcome != 'kept') if report else ()


def check_fused(keys: Collection[str], model: nn.Module, prefix: str = '') -> None:
    """Refuses a fused checkpoint for an unfused model and the reverse.

    Args:
        keys: Keys of the checkpoint, in the model's layout.
        model: The detector or backbone to load.
        prefix: ``backbone.`` for a detector, because norms of heads are never fused.

    Raises:
        CheckpointError: If only one of both is fused, or the checkpoint has norms that were folded in the model.
    """
    targets = model.state_dict().keys()
    if folded := _folded_norms(model):
        if found := [key for key in keys if key.startswith(folded) and key not in targets]:
            raise CheckpointError(
                f'the checkpoint is not fused as the model is (it has {name_some(found)}); use the config it was '
                'trained with, or fuse it with slab-det fuse'
            )
        return
    norms = tuple(f'{name}.' for name, _ in named_norms(model, OfflineNorm, nn.LayerNorm) if name.startswith(prefix))
    # Fusion replaces a norm that cannot be folded by a ChannelAffine, whose keys are scale and shift.
    norm_keys = [key for key in keys if key in targets or not key.endswith(('.scale', '.shift'))]
    lacking = [norm for norm in norms if not any(key.startswith(norm) for key in norm_keys)]
    others = {key for key in targets if key.startswith(prefix) and not key.startswith(norms)}
    # A checkpoint that lacks other weights too is incomplete, but not fused.
    if 2 * len(lacking) > len(norms) and all(key in keys or key.endswith('position_index') for key in others):
        raise CheckpointError(
            'the checkpoint is fused: it has no norms, the model still has them; use the fused config that was written '
            'beside it, or the unfused checkpoint'
        )
