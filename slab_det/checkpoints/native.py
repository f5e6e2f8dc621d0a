"""mmdet's layouts of SwinTransformer, PyramidVisionTransformer and PyramidVisionTransformerV2, which are our own."""

from __future__ import annotations

from slab_det.checkpoints.weight import CheckpointFormat, Weights


def matches(keys: set[str]) -> bool:
    return bool({'stages.0.blocks.0.attn.w_msa.qkv.weight', 'layers.0.0.projection.weight'} & keys)


def convert(weights: Weights) -> Weights:
    return weights


FORMAT = CheckpointFormat('native', matches, convert)
