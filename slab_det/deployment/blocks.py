"""Blocks of a backbone in their deployed form: attention, FFN and position embedding that work in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.attention.geometry import resize_table
from slab_det.backbones.blocks import Block
from slab_det.backbones.pvt import PositionEmbedding
from slab_det.deployment.attention import deploy_attention
from slab_det.deployment.ffn import deploy_ffn
from slab_det.fusion.folds import find_hooks


class DeployedPositionEmbedding(nn.Module):
    """Adds the position embedding, in place."""

    def __init__(self, embedding: PositionEmbedding) -> None:
        super().__init__()
        self.pos_embed, self.pos_shape = embedding.pos_embed, embedding.pos_shape

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        return x.add_(resize_table(self.pos_embed, self.pos_shape, hw_shape))


def deploy_blocks(backbone: nn.Module) -> None:
    """Gives the blocks of a SLABSwin or SLABPVT attention and FFNs that work in place on their tokens.

    A block that computes in another way, or is watched by hooks, stays as it is.
    """
    for parent in list(backbone.modules()):
        for name, child in parent.named_children():
            # Exactly these: a subclass may keep the tokens that are overwritten.
            if type(child) is Block and not any(map(find_hooks, child.modules())):
                _deploy_block(child)
            elif type(child) is PositionEmbedding and not any(map(find_hooks, child.modules())):
                setattr(parent, name, DeployedPositionEmbedding(child))
    # Tokens are channels last: the maps are then views of them.
    backbone.memory_format = torch.channels_last


def _deploy_block(block: Block) -> None:
    attn = deploy_attention(block.norm1, block.attn)
    if attn is None:
        return
    block.norm1, block.attn = nn.Identity(), attn
    ffn = deploy_ffn(block.norm2, block.ffn)
    if ffn is not None:
        block.norm2, block.ffn = nn.Identity(), ffn
