"""Which LayerNorms of a model can be replaced."""

from __future__ import annotations

from torch import nn

from slab_det.fusion.folds import find_hooks


def reason_to_keep(name: str, norm: nn.LayerNorm, owner: nn.Module) -> str | None:
    """Why a LayerNorm of this name, an attribute of ``owner``, cannot be replaced; None if it can."""
    # Takes half a second.
    from timm.layers import LayerNorm, LayerNormFp32

    if not name:
        return 'it is the whole model'
    if hooks := find_hooks(norm):
        return f'it has {hooks}'
    if len(norm.normalized_shape) != 1:
        return f'it normalizes over {len(norm.normalized_shape)} dimensions'
    # These normalize the last dimension and do no more. Any other forward may permute or apply an activation.
    if type(norm).forward not in (nn.LayerNorm.forward, LayerNorm.forward, LayerNormFp32.forward):
        return f'{type(norm).__name__} has a forward of its own, which may do more than normalize the last dimension'
    if isinstance(owner, nn.TransformerEncoderLayer):
        return f'the fused kernel of {type(owner).__name__} reads its weights and never calls it'
    return None
