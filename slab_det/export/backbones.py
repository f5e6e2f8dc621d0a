"""Replaces backbone layers by export forms, which read the sizes of maps from the input instead of fixing them."""

from __future__ import annotations

import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.layers import PatchEmbed
from torch import Tensor, nn

from slab_det.attention import ShiftedWindowAttention
from slab_det.attention.window_index import WindowIndex
from slab_det.backbones.adopt import adopt, replace_layers, why_not_adopted
from slab_det.backbones.blocks import LinearFFN, PatchMerging, deployed_merging
from slab_det.common.errors import ExportError
from slab_det.common.modules import as_class
from slab_det.norms.folds import LINEAR


class RowsLinear(nn.Linear):
    """A linear layer for batch 1, exported as a Gemm, which has an int8 kernel, instead of MatMul and Add.

    Shape:
        (1, L, C) -> (1, L, C').
    """

    def forward(self, x: Tensor) -> Tensor:
        # x[0] would be a Gather, which copies; a reshape does not.
        return F.linear(x.reshape(-1, self.weight.shape[1]), self.weight, self.bias)[None]


def _rows_linear(layer: nn.Module) -> RowsLinear | None:
    """The :class:`RowsLinear` of a linear layer; None for every other layer."""
    return as_class(layer, RowsLinear) if type(layer) in LINEAR and 'weight' in layer._parameters else None


def make_size_free(model: nn.Module) -> None:
    """Replaces, in place, every module whose trace would only be correct for one image size.

    Raises:
        ExportError: If a block, a patch embedding or a patch merging of mmdet has no export form.
    """
    adopt(model)
    replace_layers(model, deployed_merging)
    for name, module in list(model.named_modules()):
        if reason := why_not_adopted(module):
            raise ExportError(f'{name} has no export form: {reason}')
        if isinstance(module, PatchEmbed) and module.adap_padding is not None:
            stride = module.projection.stride
            if module.adap_padding.padding != 'corner' or module.projection.kernel_size != stride:
                raise ExportError("a patch embedding with padding='same' or overlapping patches has no export form")
            # The convolution ignores padding beyond the last patch.
            module.adap_padding = nn.ZeroPad2d((0, stride[1] - 1, 0, stride[0] - 1))
        if isinstance(module, ShiftedWindowAttention):
            module.make_windows = WindowIndex
            # Only these two always read batch 1: other layers of an attention may read a batch of windows.
            for name in ('qkv', 'proj'):
                layer = getattr(module.w_msa, name)
                setattr(module.w_msa, name, _rows_linear(layer) or layer)
        if isinstance(module, PatchMerging | FFN | LinearFFN):
            replace_layers(module, _rows_linear)
