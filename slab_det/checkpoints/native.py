"""mmdet's SwinTransformer layout, which is our own."""
from __future__ import annotations

from .weight import CheckpointFormat, Weights


def matches(keys: set[str]) -> bool:
    return 'stages.0.blocks.0.attn.w_msa.qkv.weight' in keys


def convert(weights: Weights) -> Weights:
    return weights


FORMAT = CheckpointFormat('native', matches, convert)
