"""Tells fused checkpoints and models from unfused ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from torch import nn

from slab_det.runtime.errors import CheckpointError


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`slab_det.fuse` removed norms of this model, now or when its checkpoint was written."""
    report = getattr(model, 'fusion_report', None)
    return report is not None and any(norm.fate != 'kept' for norm in report.norms)


def is_fused_checkpoint(checkpoint: Mapping) -> bool:
    """Whether a checkpoint says that it is fused, as those of slab_det do since 0.1."""
    meta = checkpoint.get('meta')
    return isinstance(meta, Mapping) and bool(meta.get('fused'))


def check_fused(checkpoint: Mapping, keys: Iterable[str], model: nn.Module, name: str) -> None:
    """Refuses a fused checkpoint for an unfused model and the reverse.

    Args:
        checkpoint: What a file held.
        keys: The names of its weights, as the model would call them.
        model: The detector or backbone that they are for.
        name: The file, for the error.

    Raises:
        CheckpointError: If only one of them is fused.
    """
    if is_fused(model):
        if not _fit_fused(set(keys), model):
            raise CheckpointError(
                f'{name} is not fused, the model is; use the config it was trained with, or fuse it with tools/fuse.py'
            )
    elif is_fused_checkpoint(checkpoint):
        raise CheckpointError(
            f'{name} is fused: it has no norms, the model still has them; use the fused config that was written '
            'beside it, or the unfused checkpoint'
        )


def _fit_fused(keys: set[str], model: nn.Module) -> bool:
    """Whether the weights have every layer that took a norm of ``model``, and no norm that is folded."""
    names = keys | {prefix for key in keys for prefix in accumulate(key.split('.'), '{}.{}'.format)}
    report = model.fusion_report
    layers = {into.partition('[')[0] for fate in report.select('folded') for into in fate.into.split(', ')}
    return (
        layers <= names
        and names.isdisjoint(fate.norm for fate in report.select('folded'))
        and names.issuperset(f'{fate.norm}.scale' for fate in report.select('affine'))
    )
