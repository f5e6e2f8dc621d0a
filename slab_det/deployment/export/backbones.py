"""Backbones in their exported form: everything that depends on the size of the map is arithmetic on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mmcv.cnn import Linear
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmdet.models.layers import PatchEmbed
from mmdet.models.layers import PatchMerging as MmdetPatchMerging
from torch import Tensor, nn

from slab_det.attention import ShiftedWindowAttention
from slab_det.backbones.blocks import LinearFFN, PatchMerging
from slab_det.deployment.export.token_index import WindowIndex
from slab_det.fusion.stock_mmdet import own_attention
from slab_det.runtime.errors import ExportError


class SizeFreePatchEmbed(nn.Module):
    """mmdet's PatchEmbed whose padding at the bottom right does not depend on the size.

    One patch more than needed is padded; where sides are whole patches the convolution leaves it out.

    Args:
        embed: Gives its layers; its patches do not overlap.
    """

    def __init__(self, embed: PatchEmbed) -> None:
        super().__init__()
        self.projection = embed.projection
        self.norm = embed.norm
        height, width = embed.projection.stride
        self.pad = (0, width - 1, 0, height - 1)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens (1, H * W, C) of an image, and their (H, W)."""
        x = self.projection(F.pad(x, self.pad))
        hw_shape = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        return (x if self.norm is None else self.norm(x)), hw_shape


class RowsLinear(nn.Linear):
    """A linear layer on the rows of one image: a Gemm, whose bias an int8 kernel takes, and no MatMul and Add.

    Args:
        layer: Gives its parameters.

    Shape:
        (1, L, C) -> (1, L, C').
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[0])[None]


def make_size_free(model: nn.Module) -> None:
    """Replaces, in place, every module whose forward depends on sizes in another way than by arithmetic.

    mmdet's attention and patch merging give their layers to ours.

    Raises:
        ExportError: If a patch embedding or patch merging has no export form.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is ShiftWindowMSA:
                setattr(parent, name, own_attention(child))
            elif isinstance(child, MmdetPatchMerging):
                setattr(parent, name, own_merging(child))
            elif isinstance(child, PatchEmbed) and child.adap_padding is not None:
                setattr(parent, name, _size_free_embedding(child))
    for module in list(model.modules()):
        if isinstance(module, ShiftedWindowAttention):
            module.make_windows = WindowIndex
        if isinstance(module, ShiftedWindowAttention | PatchMerging | FFN | LinearFFN):
            _use_rows(module)


def _use_rows(module: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) in (nn.Linear, Linear):
                setattr(parent, name, RowsLinear(child))


def _size_free_embedding(embed: PatchEmbed) -> SizeFreePatchEmbed:
    projection = embed.projection
    if embed.adap_padding.padding != 'corner' or projection.kernel_size != projection.stride:
        raise ExportError("a patch embedding that pads by 'same', or whose patches overlap, has no export form")
    return SizeFreePatchEmbed(embed)


def own_merging(merging: MmdetPatchMerging) -> PatchMerging:
    """Our patch merging with the layers of mmdet's, whose weights are permuted in place."""
    if merging.reduction.in_features != 4 * merging.in_channels or merging.sampler.stride != (2, 2):
        raise ExportError('the patch merging of this mmdet Swin does not take 2x2 blocks: it has no export form')
    with torch.device('meta'):
        ours = PatchMerging(merging.in_channels, merging.out_channels)
    state = merging.state_dict()
    ours.norm, ours.reduction = merging.norm, merging.reduction
    ours.load_state_dict({key: value.clone() for key, value in state.items()})
    return ours
