"""Which LayerNorms of a model can be replaced, and a description of its norms where none can."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

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
    if isinstance(owner, nn.TransformerEncoderLayer) and not owner.norm_first:
        return f'the fused kernel of {type(owner).__name__} reads its weights and never calls it'
    return None


def describe_others(model: nn.Module, kept: dict[str, str]) -> str:
    """Describes, in brackets for a message, the norms of a model that has no LayerNorm to replace.

    Args:
        model: The model.
        kept: The reason why each of its LayerNorms stays, by name.
    """
    names = defaultdict(list)
    for name, reason in kept.items():
        names[reason].append(name)
    parts = [f'{first}{f" and {len(more)} more" * bool(more)}: {reason}' for reason, (first, *more) in names.items()]
    others = Counter(type(m).__name__ for m in model.modules() if isinstance(m, (nn.GroupNorm, nn.RMSNorm, _NormBase)))
    if others:
        parts.append(f'its {", ".join(f"{count} {kind}" for kind, count in others.items())} are no LayerNorms')
    return f' ({"; ".join(parts)})' if parts else ''
