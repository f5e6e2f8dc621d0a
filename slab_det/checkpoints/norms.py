"""Fits the norms of a checkpoint to the norms of a model.

| checkpoint | model | what is loaded |
|---|---|---|
| same | same | all of it |
| LayerNorm | PRepBN | its LayerNorm branch, gamma 1 |
| RepBN or BatchNorm | PRepBN | its RepBN branch (eta = 0 for BatchNorm), gamma 0 |
| PRepBN at gamma 0 | RepBN | the RepBN branch |
| BatchNorm | RepBN | eta = 0 |
| LayerNorm | TokenBN, RepBN, UN, MABN, PowerNorm | weight and bias to start training; no statistics |
| UN, MABN, PowerNorm | another of them, or another window | weight, bias and running_var; averages begin anew |

Everything else is an error. A LayerNorm cannot hold statistics. UN, MABN and PowerNorm subtract no mean, and their
running_var is the mean of x^2. A PRepBN at gamma > 0 is partly LayerNorm. A TokenBN has no eta.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from slab_det.checkpoints.layouts import Weight, Weights
from slab_det.checkpoints.report import LoadReport
from slab_det.norms import OfflineNorm, PRepBN, QuadraticNorm, RepBN, TokenBN, named_norms
from slab_det.runtime.errors import CheckpointError, name_some

_AFFINE = {'weight', 'bias'}
_BATCH_NORM = _AFFINE | {'running_mean', 'running_var'}
KEYS_OF_KIND = {
    'LayerNorm': _AFFINE,
    'BatchNorm': _BATCH_NORM,
    'RepBN': _BATCH_NORM | {'eta'},
    'PRepBN': {'_gamma', *(f'ln.{key}' for key in _AFFINE), *(f'repbn.{key}' for key in (*_BATCH_NORM, 'eta'))},
}
# What UN, MABN and PowerNorm need at inference. Their averages differ, and the authors' code has buffers of its own.
QUADRATIC = 'UN, MABN or PowerNorm'
QUADRATIC_KEYS = _AFFINE | {'running_var'}
# (norm of the checkpoint, norm of the model): prefix of the weights' names in the model, and values that follow.
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
    """Converts the weights of every norm to those that the norm of the same name in ``model`` can load.

    ``report`` receives gammas, and keys that are missing or unused for a reason.

    Raises:
        CheckpointError: If a norm cannot hold what the checkpoint has for it.
    """
    fitted = dict(weights)
    for name, norm in named_norms(model, OfflineNorm, nn.LayerNorm):
        prefix = f'{name}.'
        given = {key[len(prefix) :]: fitted.pop(key) for key in weights if key.startswith(prefix)}
        if not given:
            continue
        values, reason = _fit_norm(name, given, norm)
        if reason:
            missing = norm.state_dict().keys() - values.keys()
            report.missing_expected.update({prefix + key: reason for key in missing})
            taken = {weight.key for weight in values.values()}
            report.unused_expected.update({w.key: reason for w in given.values() if w.key not in taken})
        if '_gamma' in values:
            report.gammas[name] = float(values['_gamma'].value)
        fitted.update({prefix + key: weight for key, weight in values.items()})
    return fitted


def _fit_norm(name: str, given: Weights, norm: nn.Module) -> tuple[Weights, str]:
    """Returns the weights that ``norm`` loads, and the reason why others of the norm or of the file are left out."""
    targets = norm.state_dict()
    if isinstance(norm, nn.LayerNorm) and given.keys() <= targets.keys():
        return given, ''
    # A norm from outside this package may name its weights as it likes.
    is_same = given.keys() == targets.keys()
    if isinstance(norm, QuadraticNorm):
        # The window has a size of its own.
        is_same = is_same and all(given[key].value.shape == value.shape for key, value in targets.items())
    if is_same:
        return given, ''
    kind = held = _kind(name, given)
    if kind == QUADRATIC and isinstance(norm, QuadraticNorm):
        return {key: given[key] for key in QUADRATIC_KEYS}, 'averages of another training'
    if kind == 'PRepBN' and isinstance(norm, TokenBN):
        gamma = float(given['_gamma'].value)
        held = f'PRepBN at gamma {gamma:g}'
        if gamma == 0:
            kind = 'RepBN'
            given = {key.removeprefix('repbn.'): weight for key, weight in given.items() if key.startswith('repbn.')}
    fit = next((FITS[kind, base] for base in type(norm).__mro__ if (kind, base) in FITS), None)
    if fit is None:
        suited = {'BatchNorm': "dict(type='TokenBN')", QUADRATIC: f'the {QUADRATIC} it was trained with'}
        raise CheckpointError(
            f'{name}: the checkpoint holds a {held}, the model a {type(norm).__name__}, which cannot take it; set '
            'norm_cfg (and out_norm_cfg for output norms) of the backbone to '
            + suited.get(kind, f"dict(type='{kind}')")
        )
    prefix, implied = fit
    # The report names added values by the key of the norm's first weight.
    key = next(iter(given.values())).key
    fitted = {prefix + part: weight for part, weight in given.items()}
    for part, value in implied.items():
        change = f'{part.removeprefix("repbn.").strip("_")} {value:g} for {held}'
        fitted[part] = Weight(torch.full_like(targets[part], value), key, change)
    return fitted, f'the checkpoint holds {held}' + (': train before fusing' if kind == 'LayerNorm' else '')


def _kind(name: str, given: Weights) -> str:
    """The kind of norm that a checkpoint holds; CheckpointError if it is no whole norm of a known kind."""
    keys = {key for key in given if not key.endswith('num_batches_tracked')}
    for kind, expected in KEYS_OF_KIND.items():
        if keys == expected:
            return kind
    if given.keys() >= QUADRATIC_KEYS and not given.keys() & {'running_mean', 'num_batches_tracked', 'eta'}:
        return QUADRATIC
    raise CheckpointError(
        f'{name}: the checkpoint holds {", ".join(weight.key for weight in given.values())}, which make none of '
        f'{", ".join(KEYS_OF_KIND)}, {QUADRATIC}: a part is missing, or the norm is not known here; give a whole '
        'checkpoint, buffers included, with one of these norms'
    )


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`slab_det.fuse` removed norms of this model, now or when its checkpoint was written."""
    report = getattr(model, 'fusion_report', None)
    return report is not None and any(norm.outcome != 'kept' for norm in report.norms)


def check_fused(keys: Collection[str], model: nn.Module, prefix: str = '') -> None:
    """Refuses a fused checkpoint for an unfused model and the reverse.

    Args:
        keys: The names of the checkpoint's weights, in the model's layout.
        model: The detector or backbone that they are for.
        prefix: ``backbone.`` for a detector: only its backbone tells, as heads may have norms that are never fused.

    Raises:
        CheckpointError: If only one of them is fused, or if the checkpoint has norms that were folded in the model.
    """
    targets = model.state_dict().keys()
    if is_fused(model):
        gone = tuple(f'{fusion.norm}.' for fusion in model.fusion_report.norms if fusion.outcome != 'kept')
        found = [key for key in keys if key.startswith(gone) and key not in targets]
        if found:
            raise CheckpointError(
                f'the checkpoint is not fused as the model is (it has {name_some(found)}); use the config it was '
                'trained with, or fuse it with slab-det fuse'
            )
        return
    known = named_norms(model, OfflineNorm, nn.LayerNorm)
    norms = tuple(f'{norm}.' for norm, _ in known if norm.startswith(prefix))
    # A norm that cannot be folded becomes a ChannelAffine, whose scale and shift are no weights of a norm.
    norm_keys = [key for key in keys if key in targets or not key.endswith(('.scale', '.shift'))]
    lacking = [norm for norm in norms if not any(key.startswith(norm) for key in norm_keys)]
    others = {key for key in targets if key.startswith(prefix) and not key.startswith(norms)}
    others = {key for key in others if not key.endswith('.relative_position_index')}
    if 2 * len(lacking) > len(norms) and others <= set(keys):
        raise CheckpointError(
            'the checkpoint is fused: it has no norms, the model still has them; use the fused config that was written '
            'beside it, or the unfused checkpoint'
        )
