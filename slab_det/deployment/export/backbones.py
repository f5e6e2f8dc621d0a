"""Replaces layers of backbones by forms for export, in which sizes of maps are computed and never constants."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmdet.models.layers import PatchEmbed
from mmdet.models.layers import PatchMerging as MmdetPatchMerging
from torch import Tensor, nn

from slab_det.attention import ShiftedWindowAttention
from slab_det.backbones.blocks import LinearFFN, PatchMerging
from slab_det.deployment.blocks import replace_layers
from slab_det.deployment.cpu.linear import DeployedLinear, deployed_linear
from slab_det.deployment.patch_merging import deployed_merging
from slab_det.deployment.window_index import WindowIndex
from slab_det.fusion.folds import CannotFold, find_hooks
from slab_det.fusion.stock_mmdet import own_attention
from slab_det.runtime.errors import ExportError


class RowsLinear(DeployedLinear):
    """A linear layer on the rows of one image: one Gemm, which has an int8 kernel, in place of MatMul and Add.

    Shape:
        (1, L, C) -> (1, L, C').
    """

    def forward(self, x: Tensor) -> Tensor:
        # ONNX Runtime copies x[0], which is a Gather, but does not copy a Reshape.
        return F.linear(x.reshape(-1, self.weight.shape[1]), self.weight, self.bias)[None]


rows_linear = partial(deployed_linear, kind=RowsLinear)


class RowsPatchEmbed(PatchEmbed):
    """mmdet's patch embedding with a reshape after the transpose from maps to tokens.

    Without norms, ONNX Runtime would move the transpose behind every sum of the residual stream, and transpose each
    addend instead: 1 % of the time of Swin-T. It moves no transpose behind a reshape.

    Shape:
        (1, C_in, H, W) -> (1, L, C) and the (h, w) of the map, in patches, L = h * w.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.projection(self.adap_padding(x) if self.adap_padding else x)
        tokens = x.permute(0, 2, 3, 1).reshape(1, -1, self.embed_dims)
        return tokens if self.norm is None else self.norm(tokens), x.shape[2:]


def make_size_free(model: nn.Module) -> None:
    """Replaces, in place, every module whose traced forward would hold for images of one size alone.

    Raises:
        ExportError: If a patch embedding or patch merging has no export form.
    """
    replace_layers(model, _export_form)
    for module in list(model.modules()):
        if type(module) is PatchEmbed:
            module.__class__ = RowsPatchEmbed
        if isinstance(module, PatchEmbed) and module.adap_padding is not None:
            stride = module.projection.stride
            if module.adap_padding.padding != 'corner' or module.projection.kernel_size != stride:
                raise ExportError("a patch embedding with padding='same' or overlapping patches has no export form")
            # Pads by at most one patch too much, which the convolution leaves out.
            module.adap_padding = nn.ZeroPad2d((0, stride[1] - 1, 0, stride[0] - 1))
        if isinstance(module, ShiftedWindowAttention):
            module.make_windows = WindowIndex
            # Other layers may read windows in mix(), not the rows of one image.
            for name in ('qkv', 'proj'):
                layer = getattr(module.w_msa, name)
                setattr(module.w_msa, name, rows_linear(layer) or layer)
        if isinstance(module, PatchMerging | FFN | LinearFFN):
            replace_layers(module, rows_linear)


def _export_form(layer: nn.Module) -> nn.Module | None:
    """Our attention with the layers of mmdet's, or the deployed form of a patch merging; None for every other layer."""
    if type(layer) is PatchMerging:
        return deployed_merging(layer)
    if type(layer) is not ShiftWindowMSA and not isinstance(layer, MmdetPatchMerging):
        return None
    if any(map(find_hooks, layer.modules())):
        raise ExportError(f'a {type(layer).__name__} has hooks, which its export form would lose; remove them')
    if isinstance(layer, MmdetPatchMerging):
        merging = deployed_merging(layer)
        if merging is None:
            raise ExportError('the patch merging of this mmdet Swin does not take 2x2 blocks: it has no export form')
        return merging
    try:
        return own_attention(layer)
    except CannotFold as reason:
        raise ExportError(f'a {type(layer).__name__} has no export form: {reason}') from reason
