"""RoIAlign of channels-last maps on a CPU, as weighted sums of pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mmcv.ops import RoIAlign
from torch import Tensor, nn

from slab_det.common.modules import as_class
from slab_det.norms.base import at_least_float32


class DeployedRoIAlign(RoIAlign):
    """RoIAlign (He et al., ICCV 2017) with average pooling and one sample per pixel of a bin, rounded up.

    A bin is the mean of its samples, and a sample interpolates bilinearly between four pixels. Weights of rows and
    columns are independent, so that a bin is a weighted sum of the pixels that its samples touch::

        sum_r sum_c wy[r] wx[c] x[r, c],    wy[r] = mean over samples y of max(0, 1 - |y - r|)

    The operators of mmcv and torchvision copy a channels-last map first, and run on one thread. Half precision is
    raised to float32: a coordinate in bfloat16 is wrong by several pixels.

    Shape:
        (B, C, H, W) and RoIs (K, 5), index of the image and corners, -> (K, C, bins, bins)
    """

    def forward(self, x: Tensor, rois: Tensor) -> Tensor:
        if x.device.type != 'cpu' or not len(rois):
            return super().forward(x, rois)
        (_, channels, height, width), (bins_y, bins_x) = x.shape, self.output_size
        pixels = at_least_float32(x).permute(0, 2, 3, 1).reshape(-1, channels)
        corners = rois[:, 1:].to(pixels.dtype) * self.spatial_scale
        starts, sizes = corners[:, :2] - 0.5, corners[:, 2:] - corners[:, :2]
        rows = _Samples(starts[:, 1], sizes[:, 1], bins_y, height)
        columns = _Samples(starts[:, 0], sizes[:, 0], bins_x, width)
        output = pixels.new_empty(len(rois), bins_y * bins_x, channels)
        # RoIs whose bins touch equally many pixels are summed together.
        touched, group = torch.unique(torch.stack([rows.touched, columns.touched], 1), dim=0, return_inverse=True)
        for index, (num_rows, num_columns) in enumerate(touched.tolist()):
            chosen = (group == index).nonzero().flatten()
            row, row_weight = rows.pixels(chosen, num_rows)
            column, column_weight = columns.pixels(chosen, num_columns)
            row = row + rois[chosen, 0].long()[:, None, None] * height
            # (n, bins_y, 1, rows, 1) and (n, 1, bins_x, 1, columns)
            pixel = row[:, :, None, :, None] * width + column[:, None, :, None, :]
            weight = row_weight[:, :, None, :, None] * column_weight[:, None, :, None, :]
            shape = (-1, num_rows * num_columns)
            sums = F.embedding_bag(pixel.view(shape), pixels, per_sample_weights=weight.view(shape), mode='sum')
            output[chosen] = sums.view(len(chosen), -1, channels)
        return output.view(len(rois), bins_y, bins_x, channels).permute(0, 3, 1, 2).to(x.dtype)


class _Samples:
    """Samples of RoIs along one side of the map.

    Attributes:
        positions: Position of each sample on the map, (K, bins, samples of the largest RoI).
        weight: Weight of each sample: 1 / (samples per bin of its RoI); 0 outside of the map, and for positions that
            hold no sample.
        first: The first pixel of each bin, (K, bins).
        touched: How many pixels the largest bin of each RoI touches, (K,).
    """

    def __init__(self, start: Tensor, length: Tensor, bins: int, size: int) -> None:
        self.size = size
        number = (length / bins).ceil().nan_to_num()
        start, step, number = (value[:, None, None] for value in (start, length / bins, number))
        # In the dtype of the coordinates: an integer plus 0.5 would have the default dtype.
        bin, sample = (torch.arange(count).to(start) for count in (bins, int(number.max().clamp(1))))
        bin = bin[:, None]
        positions = start + step * (bin + (sample + 0.5) / number.clamp(min=1))
        # Samples up to one pixel outside of the map move to its edge.
        counts = (positions >= -1) & (positions <= size) & (sample < number)
        self.weight, self.positions = counts / number.clamp(min=1), positions.clamp(0, size - 1)
        ends = torch.where(sample < number, self.positions, self.positions[..., :1]).aminmax(dim=-1)
        # An index cannot be NaN; the weights of NaN positions are NaN, and so are their sums.
        self.first, last = (end.nan_to_num().long() for end in ends)
        self.touched = (last - self.first).amax(-1) + 2

    def pixels(self, chosen: Tensor, touched: int) -> tuple[Tensor, Tensor]:
        """The pixels that each bin of the chosen RoIs touches, and their weights, (n, bins, touched)."""
        pixels = self.first[chosen, :, None] + torch.arange(touched)
        distance = (self.positions[chosen, :, :, None] - pixels[:, :, None]).abs()
        return pixels.clamp(max=self.size - 1), ((1 - distance).clamp(min=0) * self.weight[chosen, ..., None]).sum(2)


def deployed_roi_align(layer: nn.Module) -> DeployedRoIAlign | None:
    """The deployed form of a RoIAlign with mmdet's usual options; None for every other layer."""
    # Exactly this class: a subclass may compute something else.
    is_known = type(layer) is RoIAlign and layer.pool_mode == 'avg' and layer.sampling_ratio == 0 and layer.aligned
    return as_class(layer, DeployedRoIAlign) if is_known else None
