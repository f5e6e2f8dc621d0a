"""Fold rules for mmpretrain's T2T-ViT. The final norm stays: the head reads it."""

from __future__ import annotations

from mmpretrain.models.backbones.t2t_vit import T2TTransformerLayer
from mmpretrain.models.utils import MultiheadAttention

from slab_det.norms.folds import Fold, register_folds

register_folds(T2TTransformerLayer, folds=lambda layer: [Fold('ln1', before='attn'), Fold('ln2', before='ffn')])
register_folds(MultiheadAttention, input_layers=lambda attn: ('qkv',))
