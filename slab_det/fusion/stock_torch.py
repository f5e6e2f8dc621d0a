"""Fold rules for torch.nn's Transformer with ``norm_first``; otherwise the residual stream passes the norms."""

from __future__ import annotations

from torch import nn

from slab_det.fusion.folds import Fold, register_folds

ENCODER_FOLDS = [Fold('norm1', before='self_attn[qkv]'), Fold('norm2', before='linear1')]
DECODER_FOLDS = [
    Fold('norm1', before='self_attn[qkv]'),
    Fold('norm2', before='multihead_attn[q]'),
    Fold('norm3', before='linear1'),
]


def _memory_folds(model: nn.Transformer) -> list[Fold]:
    """The last norm of the encoder, which every layer of the decoder reads."""
    layers = model.decoder.layers if type(model.decoder) is nn.TransformerDecoder else [model.decoder]
    if any(type(layer) is not nn.TransformerDecoderLayer for layer in layers):
        return []
    return [Fold('encoder.norm', before=tuple(f'decoder.layers.{i}.multihead_attn[kv]' for i in range(len(layers))))]


register_folds(nn.TransformerEncoderLayer, folds=lambda layer: ENCODER_FOLDS if layer.norm_first else [])
register_folds(nn.TransformerDecoderLayer, folds=lambda layer: DECODER_FOLDS if layer.norm_first else [])
register_folds(nn.Transformer, folds=_memory_folds)
