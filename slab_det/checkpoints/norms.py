"""Fits the norms of a checkpoint to the norms of a model.

| checkpoint | model | |
|---|---|---|
| same | same | as it is |
| LayerNorm | PRepBN | its LayerNorm branch, gamma 1 |
| RepBN or BatchNorm | PRepBN | its RepBN branch (eta = 0 for BatchNorm), gamma 0 |
| PRepBN at gamma 0 | RepBN | the RepBN branch |
| BatchNorm | RepBN | eta = 0 |
| LayerNorm | TokenBN, RepBN, UN, MABN, PowerNorm | weight and bias to start training; no statistics |
| UN, MABN, PowerNorm | another of them, or another window | weight, bias and running_var; averages begin anew |
| UN, MABN, PowerNorm | same, but at the start of a training | the same three |
| PRepBN, RepBN, BatchNorm | LayerNorm | an error: a LayerNorm cannot hold them |
| UN, MABN, PowerNorm | any other norm | an error: their running_var is no variance but the mean of x^2 |
| PRepBN, RepBN, BatchNorm | UN, MABN, PowerNorm | an error: they subtract no mean |
| PRepBN at gamma > 0 | TokenBN, RepBN | an error: part of it is LayerNorm |
| with eta | TokenBN | an error: eta has no place |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import nn

from slab_det.checkpoints.layouts import Weight, Weights
from slab_det.checkpoints.report import LoadReport, name_some
from slab_det.norms import OfflineNorm, PRepBN, QuadraticNorm, named_offline_norms
from slab_det.runtime.errors import CheckpointError

# What _kind calls UN, MABN and PowerNorm, whatever of their averages a checkpoint holds.
QUADRATIC = 'norm without mean'
STATE_OF_TRAINING = 'state of another training'

_AFFINE = ('weight', 'bias')
_BATCH_NORM = (*_AFFINE, 'running_mean', 'running_var', 'num_batches_tracked')
KEYS_OF_KIND = {
    'LayerNorm': _AFFINE,
    'BatchNorm': _BATCH_NORM,
    'RepBN': (*_BATCH_NORM, 'eta'),
    'PRepBN': ('_gamma', *(f'ln.{name}' for name in _AFFINE), *(f'repbn.{name}' for name in (*_BATCH_NORM, 'eta'))),
}


def fit_norms(weights: Weights, model: nn.Module, report: LoadReport, keep_averages: bool = True) -> Weights:
    """Turns every norm of ``weights`` into what the norm of that name in ``model`` can load.

    Args:
        weights: Weights in the layout of ``model`` but for the kinds of norms.
        model: Where they will go; left as it is.
        report: Receives gammas, expected gaps and notes.
        keep_averages: Whether counters, windows and psi of UN, MABN and PowerNorm belong to the weights. They do in
            resuming and testing; another training starts its own.

    Raises:
        CheckpointError: If a norm cannot hold what the checkpoint has for it.
    """
    fitted = dict(weights)
    notes: dict[str, int] = {}
    for name, norm in named_norms(model):
        prefix = f'{name}.'
        given = {key[len(prefix) :]: fitted.pop(key) for key in weights if key.startswith(prefix)}
        if given:
            for key, weight in _fit_norm(prefix, given, norm, report, notes, keep_averages).items():
                fitted[prefix + key] = weight
    report.notes += [f'{note} ({count} norms)' for note, count in notes.items()]
    return fitted


def named_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every offline norm and every LayerNorm that is no part of one."""
    offline = dict(named_offline_norms(model))
    yield from offline.items()
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) and name.rpartition('.')[0] not in offline:
            yield name, module


def _kind(given: Weights) -> str:
    if 'ln.weight' in given or '_gamma' in given:
        return 'PRepBN'
    if 'eta' in given:
        return 'RepBN'
    if 'running_mean' in given or 'num_batches_tracked' in given:
        return 'BatchNorm'
    return QUADRATIC if 'running_var' in given else 'LayerNorm'


def _check_keys(prefix: str, kind: str, given: Weights) -> None:
    """Refuses a norm with more than its kind has, or whose statistics were lost: it would be half of another norm."""
    if kind == QUADRATIC:
        # The authors' code has buffers of its own.
        return
    unknown = [given[key].key for key in given if key not in KEYS_OF_KIND[kind]]
    if unknown:
        raise CheckpointError(
            f'{prefix[:-1]}: the checkpoint holds {name_some(unknown)} beside what a {kind} has: it is of a norm that '
            f'is not known here; give a checkpoint with one of {", ".join(KEYS_OF_KIND)}, UN, MABN and PowerNorm'
        )
    branch = 'repbn.' if kind == 'PRepBN' else ''
    is_needed = kind in ('BatchNorm', 'RepBN') or (
        kind == 'PRepBN' and '_gamma' in given and float(given['_gamma'].value) < 1
    )
    lost = [name for name in ('running_mean', 'running_var') if branch + name not in given]
    if is_needed and lost:
        raise CheckpointError(
            f'{prefix[:-1]}: the checkpoint holds a {kind} without {" and ".join(lost)} (it has '
            f'{name_some(weight.key for weight in given.values())}): its inference would run on statistics of no data; '
            'get the whole checkpoint, buffers included'
        )


def _fit_norm(
    prefix: str, given: Weights, norm: nn.Module, report: LoadReport, notes: dict[str, int], keep_averages: bool
) -> Weights:
    kind = _kind(given)
    # Its own weights, whatever a norm of somebody else's calls them.
    is_own = isinstance(norm, OfflineNorm) and given.keys() == norm.state_dict().keys()
    if not is_own:
        _check_keys(prefix, kind, given)
    if isinstance(norm, PRepBN) and kind != QUADRATIC:
        return _fit_progressive(prefix, kind, given, report, notes)
    if isinstance(norm, QuadraticNorm) and kind == QUADRATIC:
        return _fit_quadratic(prefix, given, norm, report, notes, keep_averages)
    if isinstance(norm, OfflineNorm):
        return _fit_offline(prefix, kind, given, norm, report, notes)
    if kind != 'LayerNorm':
        raise _other_norm(prefix, kind, norm)
    return given


def _fit_progressive(prefix: str, kind: str, given: Weights, report: LoadReport, notes: dict[str, int]) -> Weights:
    if kind == 'PRepBN':
        fitted = given
    elif kind == 'LayerNorm':
        fitted = {f'ln.{key}': weight for key, weight in given.items()}
        fitted['_gamma'] = _constant(given, torch.ones((), dtype=torch.float64), 'gamma 1 for LayerNorm weights')
        _expect_missing(
            prefix + 'repbn.',
            ('weight', 'bias', 'running_mean', 'running_var', 'eta'),
            'RepBN of LayerNorm weights',
            report,
        )
        _count(notes, 'LayerNorm weights fill PRepBN at gamma 1: train down to gamma 0 before fusing')
    else:
        fitted = {f'repbn.{key}': weight for key, weight in _with_eta(kind, given).items()}
        fitted['_gamma'] = _constant(given, torch.zeros((), dtype=torch.float64), 'gamma 0 for a finished decay')
        _expect_missing(prefix + 'ln.', ('weight', 'bias'), 'LayerNorm after a finished decay', report)
    if '_gamma' in fitted:
        report.gammas[prefix[:-1]] = float(fitted['_gamma'].value)
    return fitted


def _fit_offline(
    prefix: str, kind: str, given: Weights, norm: OfflineNorm, report: LoadReport, notes: dict[str, int]
) -> Weights:
    names = norm.state_dict().keys()
    if given.keys() == names:
        return given
    if kind != 'LayerNorm' and (kind == QUADRATIC or isinstance(norm, QuadraticNorm)):
        raise _other_norm(prefix, kind, norm)
    if kind == 'PRepBN':
        gamma = float(given['_gamma'].value) if '_gamma' in given else 1.0
        if gamma > 0:
            raise _misfit(prefix, f'PRepBN at gamma {gamma:g}', norm, "set norm_cfg to dict(type='PRepBN')")
        for key, weight in given.items():
            if not key.startswith('repbn.'):
                report.unused_expected[weight.key] = 'LayerNorm after a finished decay'
        given = {key.removeprefix('repbn.'): weight for key, weight in given.items() if key.startswith('repbn.')}
    if 'eta' in given and 'eta' not in names:
        raise _misfit(prefix, 'RepBN', norm, "set norm_cfg to dict(type='RepBN') or dict(type='PRepBN')")
    if kind == 'LayerNorm':
        _expect_missing(prefix, names - given.keys(), f'{type(norm).__name__} of LayerNorm weights', report)
        _count(
            notes,
            f'weight and bias of LayerNorm start {type(norm).__name__}, whose statistics are not loaded: '
            'train before measuring anything',
        )
        return {
            key: weight.changed(weight.value, f'LayerNorm as a start for {type(norm).__name__}')
            for key, weight in given.items()
        }
    return _with_eta(kind, given) if 'eta' in names else given


def _fit_quadratic(
    prefix: str, given: Weights, norm: QuadraticNorm, report: LoadReport, notes: dict[str, int], keep_averages: bool
) -> Weights:
    targets = norm.state_dict()
    is_same = given.keys() == targets.keys() and all(given[key].value.shape == targets[key].shape for key in targets)
    if is_same and keep_averages:
        return given
    reason = f'averages of training, begun anew by {type(norm).__name__}' if keep_averages else STATE_OF_TRAINING
    common = ('weight', 'bias', 'running_var')
    report.unused_expected.update({weight.key: reason for key, weight in given.items() if key not in common})
    _expect_missing(prefix, targets.keys() - set(common), reason, report)
    if not is_same:
        _count(notes, f'{type(norm).__name__} takes weight, bias and running_var of another norm or window')
    return {key: weight for key, weight in given.items() if key in common}


def _with_eta(kind: str, given: Weights) -> Weights:
    if kind != 'BatchNorm':
        return given
    return {**given, 'eta': _constant(given, torch.zeros(1), 'eta 0 for BatchNorm')}


def _constant(given: Weights, value: torch.Tensor, reason: str) -> Weight:
    """A value that the file implies: it stands under the key of the norm's first weight."""
    return Weight(value, next(iter(given.values())).key, reason)


def _expect_missing(prefix: str, names: Iterable[str], reason: str, report: LoadReport) -> None:
    report.missing_expected.update({prefix + name: reason for name in names})


def _count(notes: dict[str, int], note: str) -> None:
    notes[note] = notes.get(note, 0) + 1


def _other_norm(prefix: str, kind: str, norm: nn.Module) -> CheckpointError:
    given = {'BatchNorm': "dict(type='TokenBN')", QUADRATIC: 'the UN, MABN or PowerNorm it was trained with'}
    return _misfit(
        prefix,
        kind,
        norm,
        'set norm_cfg (and out_norm_cfg for output norms) of the backbone to '
        + given.get(kind, f"dict(type='{kind}')"),
    )


def _misfit(prefix: str, kind: str, norm: nn.Module, remedy: str) -> CheckpointError:
    return CheckpointError(
        f'{prefix[:-1]}: the checkpoint holds a {kind}, the model a {type(norm).__name__}, which cannot take it; '
        f'{remedy}'
    )


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`slab_det.fuse` removed norms of this model, now or when its checkpoint was written."""
    report = getattr(model, 'fusion_report', None)
    return report is not None and any(norm.fate != 'kept' for norm in report.norms)


def check_fused(checkpoint: Mapping, keys: Iterable[str], model: nn.Module, name: str) -> None:
    """Refuses a fused checkpoint for an unfused model and the reverse.

    Args:
        checkpoint: What a file held; its ``meta`` may say that it is fused.
        keys: The names of its weights, as the model would call them.
        model: The detector or backbone that they are for.
        name: The file, for the error.

    Raises:
        CheckpointError: If only one of them is fused, or if other norms of the checkpoint were folded.
    """
    keys = set(keys)
    if not is_fused(model):
        meta = checkpoint.get('meta')
        if (isinstance(meta, Mapping) and meta.get('fused')) or _lack_norms(keys, model):
            raise CheckpointError(
                f'{name} is fused: it has no norms, the model still has them; use the fused config that was written '
                'beside it, or the unfused checkpoint'
            )
        return
    names = keys | {prefix for key in keys for prefix in accumulate(key.split('.'), '{}.{}'.format)}
    folded, affine = (model.fusion_report.select(fate) for fate in ('folded', 'affine'))
    unfused = [fate.norm for fate in folded if fate.norm in names]
    needed = {layer.partition('[')[0] for fate in folded for layer in fate.into.split(', ')}
    needed |= {f'{fate.norm}.scale' for fate in affine}
    if unfused or not needed <= names:
        found = f'it has {name_some(unfused)}' if unfused else f'it has no {name_some(sorted(needed - names))}'
        raise CheckpointError(
            f'{name} is not fused as the model is ({found}); use the config it was trained with, or fuse it with '
            'tools/fuse.py'
        )


def _lack_norms(keys: set[str], model: nn.Module) -> bool:
    """Whether ``keys`` are all weights of ``model`` but those of most norms."""
    norms = [f'{name}.' for name, _ in named_norms(model)]
    # A norm that could not be folded is an affine, with a scale and a shift.
    prefixes = {key.rpartition('.')[0] + '.' for key in keys if not key.endswith(('.scale', '.shift'))}
    gone = [norm for norm in norms if not any(prefix.startswith(norm) for prefix in prefixes)]
    others = {key for key in model.state_dict() if not key.startswith(tuple(norms))}
    indices = {key for key in others if key.endswith('.relative_position_index')}
    return 2 * len(gone) > len(norms) and others - indices <= keys
