"""Tells fused checkpoints from unfused ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slab_det.runtime.errors import CheckpointError


def check_fused(keys: Iterable[str], targets: Iterable[str], name: str) -> None:
    """Refuses a fused checkpoint for an unfused model and the reverse.

    Raises:
        CheckpointError: If only one of them is fused.
    """
    fused_keys, fused_targets = is_fused(keys), is_fused(targets)
    if fused_keys and not fused_targets:
        raise CheckpointError(
            f'{name} is fused: it has no norms, the model still has them; use the fused config that was written '
            'beside it, or the unfused checkpoint'
        )
    if fused_targets and not fused_keys:
        raise CheckpointError(
            f'{name} is not fused, the model is; use the config it was trained with, or fuse it with tools/fuse.py'
        )


def is_fused(keys: Iterable[str]) -> bool:
    """Whether the keys are those of a fused Swin or PVT, of its backbone alone or of the whole detector."""
    keys = list(keys)
    if any(re.search(r'\.(downsample\.reduction\.bias|padding_qkv)$', key) for key in keys):
        return True
    # Every patch embedding of a PVT has a norm until it is folded into the convolution.
    embeddings = {match[1] for key in keys if (match := re.match(r'(.*\blayers\.\d+\.0\.)projection\.weight$', key))}
    normed = {match[1] for key in keys if (match := re.match(r'(.*\blayers\.\d+\.0\.)norm\.', key))}
    return bool(embeddings - normed)
