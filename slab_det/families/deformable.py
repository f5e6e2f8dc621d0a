"""Multi-scale deformable attention (Deformable DETR, Zhu et al., ICLR 2021) that never asks a GPU for sizes of maps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttention, multi_scale_deformable_attn_pytorch
from mmdet.models.layers import MSDeformAttnPixelDecoder
from mmdet.models.task_modules.prior_generators import MlvlPointGenerator
from torch import Tensor, nn

from slab_det.backbones.adopt import replace_layers
from slab_det.common.modules import as_class
from slab_det.families.constants import constant
from slab_det.families.operators import numbers
from slab_det.norms.base import at_least_float32

# The height and width of each map.
Sizes = tuple[tuple[int, int], ...]


class DeformableAttention(MultiScaleDeformableAttention):
    """mmcv's attention, which also takes ``spatial_shapes`` as numbers, and needs no compiled operators of mmcv.

    Positions of samples are computed in float32, also in half precision.
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
        return self.output_proj(self.sample(values, spatial_shapes, reference_points, offsets, logits)) + identity

    def sample(self, values: Tensor, sizes: Sizes, references: Tensor, offsets: Tensor, logits: Tensor) -> Tensor:
        """See :func:`sample_maps`; a GPU has a kernel for it."""
        return sample_maps(values, sizes, references, offsets, logits)


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
    points, dtype = offsets.shape[4], references.dtype
    weights = at_least_float32(logits).softmax(-1).unflatten(3, (len(sizes), points))
    if references.shape[-1] == 2:
        sides = numbers(tuple((width, height) for height, width in sizes), references.device, dtype)
        locations = references[:, :, None, :, None] + offsets / sides[:, None]
    else:
        locations = references[:, :, None, :, None, :2] + offsets / points * references[:, :, None, :, None, 2:] * 0.5
    found = multi_scale_deformable_attn_pytorch(at_least_float32(values), sizes, locations, weights)
    return found.to(values.dtype)


class SizedPixelDecoder(MSDeformAttnPixelDecoder):
    """mmdet's pixel decoder of Mask2Former (Cheng et al., CVPR 2022), whose attention gets sizes as numbers."""

    def forward(self, feats: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        # From low to high resolution.
        levels = tuple(range(self.num_input_levels))[: -self.num_encoder_levels - 1 : -1]
        maps = [conv(feats[level]) for conv, level in zip(self.input_convs, levels, strict=True)]
        sizes = tuple(tuple(x.shape[2:]) for x in maps)
        paddings = [x.new_zeros(len(x), *x.shape[2:], dtype=torch.bool) for x in maps]
        positions = [self.postional_encoding(padding) for padding in paddings]
        positions = [
            level.view(1, -1, 1, 1) + x for level, x in zip(self.level_encoding.weight, positions, strict=True)
        ]
        references = centers(self.point_generator, levels, sizes, maps[0].device)
        memory = self.encoder(
            query=torch.cat([x.flatten(2).transpose(1, 2) for x in maps], 1),
            # In half precision the encodings are float32.
            query_pos=torch.cat([x.flatten(2).transpose(1, 2) for x in positions], 1).to(self.level_encoding.weight),
            key_padding_mask=torch.cat([x.flatten(1) for x in paddings], 1),
            spatial_shapes=sizes,
            reference_points=references[None, :, None].expand(len(maps[0]), -1, len(maps), -1),
            level_start_index=None,
            valid_ratios=None,
        )
        memory = memory.transpose(1, 2).split([height * width for height, width in sizes], 2)
        outs = [x.unflatten(2, size) for x, size in zip(memory, sizes, strict=True)]
        for level in range(self.num_input_levels - self.num_encoder_levels)[::-1]:
            lateral = self.lateral_convs[level](feats[level])
            coarse = F.interpolate(outs[-1], size=lateral.shape[2:], mode='bilinear', align_corners=False)
            outs.append(self.output_convs[level](lateral + coarse))
        return self.mask_feature(outs[-1]), outs[: self.num_outs]


@constant(16)
def centers(generator: MlvlPointGenerator, levels: tuple[int, ...], sizes: Sizes, device: torch.device) -> Tensor:
    """Returns the centers of all pixels of maps, in parts of their map, (K, 2)."""
    found = []
    for level, (height, width) in zip(levels, sizes, strict=True):
        points = generator.single_level_grid_priors((height, width), level, device=device)
        stride_x, stride_y = generator.strides[level]
        found.append(points / points.new_tensor([width * stride_x, height * stride_y]))
    return torch.cat(found)


def deployed_deformable(
    layer: nn.Module, attention: type[DeformableAttention] = DeformableAttention
) -> nn.Module | None:
    """The ``attention`` of mmcv's attention, or the :class:`SizedPixelDecoder` of mmdet's; None for other layers."""
    if type(layer) is MultiScaleDeformableAttention and layer.batch_first:
        return as_class(layer, attention)
    if type(layer) is MSDeformAttnPixelDecoder:
        replace_layers(layer, partial(deployed_deformable, attention=attention))
        return as_class(layer, SizedPixelDecoder) if has_own_sampling(layer) else None
    return None


def has_own_sampling(module: nn.Module) -> bool:
    """Whether all deformable attention in a module is :class:`DeformableAttention`."""
    layers = [layer for layer in module.modules() if isinstance(layer, MultiScaleDeformableAttention)]
    # A subclass with another forward may sample elsewhere.
    return all(type(layer).forward is DeformableAttention.forward for layer in layers)
