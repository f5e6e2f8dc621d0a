"""SLABSwin in its deployed form."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.backbones.swin import SLABSwin, SwinBlock

from .attention import deploy_attention
from .ffn import deploy_ffn
from .patch_merging import DeployedPatchMerging


class DeployedSwinBlock(nn.Module):
    """A block that works in place on its tokens (B, H * W, C), which must be contiguous."""

    def __init__(self, block: SwinBlock) -> None:
        super().__init__()
        self.attn = deploy_attention(block.norm1, block.attn)
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


def deploy_swin(backbone: SLABSwin) -> None:
    """Replaces what the backbone consists of by its deployed form, in place."""
    for stage in backbone.stages:
        stage.blocks = nn.ModuleList(map(DeployedSwinBlock, stage.blocks))
        if stage.downsample is not None and isinstance(stage.downsample.norm, (nn.Identity, type(None))):
            stage.downsample = DeployedPatchMerging(stage.downsample)
    # Tokens are channels last: the maps are then views of them.
    backbone.memory_format = torch.channels_last
