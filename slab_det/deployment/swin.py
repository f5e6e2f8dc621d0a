"""SLABSwin in its deployed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.backbones.swin import SLABSwin, SwinBlock
from slab_det.deployment.attention import DeployedWindowAttention, deploy_attention
from slab_det.deployment.ffn import deploy_ffn
from slab_det.fusion.interference import has_hooks


class DeployedSwinBlock(nn.Module):
    """A block that works in place on its tokens (B, H * W, C), which must be contiguous."""

    def __init__(self, attn: DeployedWindowAttention, block: SwinBlock) -> None:
        super().__init__()
        self.attn = attn
        self.deployed_ffn = deploy_ffn(block.norm2, block.ffn)
        if self.deployed_ffn is None:
            self.norm2, self.ffn = block.norm2, block.ffn

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        # The first block gets its map from a convolution.
        x = x.contiguous()
        self.attn(x, hw_shape)
        if self.deployed_ffn is None:
            return self.ffn(self.norm2(x), identity=x)
        self.deployed_ffn(x)
        return x


def deploy_block(block: nn.Module) -> nn.Module:
    """The deployed form of a block; the block itself where it computes or is watched in another way."""
    attn = None if type(block) is not SwinBlock or has_hooks(block) else deploy_attention(block.norm1, block.attn)
    return block if attn is None else DeployedSwinBlock(attn, block)


def deploy_swin(backbone: SLABSwin) -> None:
    """Replaces what the backbone consists of by its deployed form, in place."""
    for stage in backbone.stages:
        stage.blocks = nn.ModuleList(map(deploy_block, stage.blocks))
    # Tokens are channels last: the maps are then views of them.
    backbone.memory_format = torch.channels_last
