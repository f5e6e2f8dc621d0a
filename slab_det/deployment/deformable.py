"""Multi-scale deformable attention (Deformable DETR, Zhu et al., ICLR 2021) that never asks a GPU for sizes of maps."""

from __future__ import annotations

from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttention, multi_scale_deformable_attn_pytorch
from torch import Tensor, nn

from slab_det.deployment.box_operators import numbers
from slab_det.deployment.gpu import deformable_kernels, kernels
from slab_det.norms.base import at_least_float32

# The height and width of each map.
Sizes = tuple[tuple[int, int], ...]


class DeformableAttention(MultiScaleDeformableAttention):
    """mmcv's attention, which also takes ``spatial_shapes`` as numbers, and needs no compiled operators of mmcv.

    Places of samples are computed in float32, also in half precision.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | Sizes | None = None,
        **kwargs: object,
    ) -> Tensor:
        value, identity = query if value is None else value, query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        values = self.value_proj(value)
        if key_padding_mask is not None:
            values = values.masked_fill(key_padding_mask[..., None], 0.0)
        if isinstance(spatial_shapes, Tensor):
            # mmdet's own forward has them on the GPU.
            spatial_shapes = tuple(map(tuple, spatial_shapes.tolist()))
        offsets = self.sampling_offsets(query).unflatten(2, (self.num_heads, self.num_levels, self.num_points, 2))
        logits = self.attention_weights(query).unflatten(2, (self.num_heads, -1))
        values = values.unflatten(2, (self.num_heads, -1))
        return self.output_proj(sample_maps(values, spatial_shapes, reference_points, offsets, logits)) + identity


def sample_maps(values: Tensor, sizes: Sizes, references: Tensor, offsets: Tensor, logits: Tensor) -> Tensor:
    """Sums bilinear samples of maps, with weights of the softmax over all levels and points (eq. 3 of the paper).

    Args:
        values: The pixels of all maps, (N, K, heads, C).
        sizes: The height and width of each map.
        references: Centers, (N, Q, levels, 2), or boxes (x, y, w, h), (N, Q, levels, 4), in parts of the map.
        offsets: Of the samples, in pixels from a center or in parts of half a box over ``points``,
            (N, Q, heads, levels, points, 2).
        logits: (N, Q, heads, levels * points).

    Returns:
        (N, Q, heads * C).
    """
    if kernels.can_run(values) and values.dtype.itemsize <= 4:
        return deformable_kernels.sample_maps(values, sizes, references, offsets, logits)
    points, dtype = offsets.shape[4], references.dtype
    weights = at_least_float32(logits).softmax(-1).unflatten(3, (len(sizes), points))
    if references.shape[-1] == 2:
        sides = numbers(tuple((width, height) for height, width in sizes), references.device, dtype)
        places = references[:, :, None, :, None] + offsets / sides[:, None]
    else:
        places = references[:, :, None, :, None, :2] + offsets / points * references[:, :, None, :, None, 2:] * 0.5
    found = multi_scale_deformable_attn_pytorch(at_least_float32(values), sizes, places, weights)
    return found.to(values.dtype)


def deployed_deformable(layer: nn.Module) -> DeformableAttention | None:
    """Turns mmcv's attention into a DeformableAttention, in place; None for every other layer."""
    if type(layer) is not MultiScaleDeformableAttention or not layer.batch_first:
        return None
    layer.__class__ = DeformableAttention
    return layer
