"""The operators on boxes in which families of heads detect, in CUDA graphs and in ONNX files: decoding, NMS, RoIAlign.

The number of boxes depends on the image. A CUDA graph has a slot for every possible box, and gives empty slots the
score :data:`EMPTY`. An ONNX file has no empty slots. Each of the two has its subclass of :class:`BoxOperators`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.prior_generators import AnchorGenerator, MlvlPointGenerator
from torch import Tensor, nn

from slab_det.families.constants import constant

PriorGenerator = AnchorGenerator | MlvlPointGenerator
# The logarithm of the largest factor by which mmdet's delta2bbox scales a side.
MAX_LOG_RATIO = abs(math.log(16 / 1000))
# The score of a slot without a box; scores of boxes are not negative.
EMPTY = -1.0


class BoxOperators(ABC):
    """Operators on boxes whose number depends on the image."""

    @abstractmethod
    def priors(self, generator: PriorGenerator, sizes: Sequence[tuple], like: Tensor) -> Tensor:
        """Returns the anchors (A, 4) or points (A, 2) of all levels.

        Args:
            generator: The generator of the head.
            sizes: The sizes (H, W) of the maps.
            like: A tensor on the device of the result.
        """

    @abstractmethod
    def topk(self, levels: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses the ``count`` anchors of each level with the largest logits (n_i,); all for a count below 1.

        Returns:
            Scores in G batches, each in descending order; the indices of these anchors in the concatenation of
            all levels; and their levels; each (G, K).
        """

    def topk_above(self, levels: Sequence[Tensor], count: int, score_thr: float | Tensor) -> tuple[Tensor, Tensor]:
        """Chooses the ``count`` scores (n_i,) of each level that are the largest above ``score_thr``.

        Returns:
            Scores (K,), in descending order in each level, and their indices in the concatenation of all levels, (K,).
        """
        found, start = [], 0
        for scores in levels:
            # A NaN is not above the threshold.
            best, index = torch.where(scores > score_thr, scores, EMPTY).topk(min(count, len(scores)))
            found.append((best, index + start))
            start += len(scores)
        scores, index = (torch.cat(column) for column in zip(*found, strict=True))
        return scores, index

    @abstractmethod
    def candidates(self, scores: Tensor, corners: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Chooses the boxes (N, 4) whose scores (N,) are not ``EMPTY``, or the best K of them.

        Returns:
            Corners (K, 4), scores (K,) and indices (K,) of the chosen boxes; the :meth:`stride` of all boxes; and
            whether every box was chosen that has a score, or None if the operators always choose all of them.
        """

    def first_is_number(self, scores: Tensor) -> Tensor | None:
        """Whether the first score is a number; None if the operators have no empty slots."""
        # mmdet ranks a NaN score first; a slot whose score is NaN counts as empty.
        return scores[0] == scores[0]

    @abstractmethod
    def suppress(
        self, corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor, iou_threshold: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        """Suppresses boxes that overlap a better box of the same batch and group: greedy NMS.

        Args:
            corners: G batches of K boxes, (G, K, 4).
            scores: (G, K), in the order of :meth:`topk`.
            groups: The level or the label of each box, (G, K).
            stride: Result of :meth:`stride`, by which :func:`offset_groups` moves the groups apart.
            iou_threshold: Two boxes overlap if their IoU is larger.
            limit: The most boxes that are kept; all for a limit below 1.

        Returns:
            Scores (n,) of the kept boxes in descending order, and the indices of these boxes among the G * K boxes.
        """

    @abstractmethod
    def pool(
        self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Pools every box (n, 4) from its level of the pyramid by RoIAlign (FPN, Lin et al., CVPR 2017, eq. 1).

        Returns:
            Regions (n, C, h, w), and the index of each region's box, (n,), or None if regions and boxes have one order.
        """

    def class_scores(self, logits: Tensor, found: Tensor, score_thr: float | Tensor) -> Tensor:
        """Softmax scores (P, classes) without background; ``EMPTY`` up to ``score_thr`` and for ``EMPTY`` proposals."""
        scores = logits.softmax(-1)[:, :-1]
        return torch.where((scores > score_thr) & (found > EMPTY)[:, None], scores, EMPTY)

    def decode(
        self, coder: nn.Module, priors: Tensor, deltas: Tensor, limits: Tensor, index: Tensor | None = None
    ) -> Tensor:
        """Decodes deltas to corners, by ``center + delta * size`` and ``size * exp(delta)``, clipped to the image.

        See R-CNN (Girshick et al., CVPR 2014), appendix C.

        Args:
            coder: The DeltaXYWHBBoxCoder.
            priors: Corners, (A, 4).
            deltas: (A, 4) with ``index``, (A, n, 4) without it.
            limits: The image's (width, height, width, height).
            index: Indices of the boxes to decode, (...); None for all A.

        Returns:
            (..., 4), or (A, n, 4).
        """
        priors, deltas = (priors[:, None], deltas) if index is None else (priors[index], deltas[index])
        stds, means = (numbers(tuple(values), deltas.device, deltas.dtype) for values in (coder.stds, coder.means))
        deltas = deltas * stds + means
        low, high = priors[..., :2], priors[..., 2:]
        size = high - low
        center = (low + high) * 0.5 + size * deltas[..., :2]
        half = size * deltas[..., 2:].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * 0.5
        decoded = torch.cat([center - half, center + half], -1)
        return clip(decoded, limits) if coder.clip_border else decoded

    def decode_distances(
        self, coder: nn.Module, points: Tensor, distances: Tensor, limits: Tensor, index: Tensor
    ) -> Tensor:
        """Decodes the distances of points from the four sides of their boxes, clipped to the image.

        See FCOS (Tian et al., ICCV 2019), eq. 1.

        Args:
            coder: The DistancePointBBoxCoder.
            points: (A, 2).
            distances: (A, 4).
            limits: The image's (width, height, width, height).
            index: Indices of the boxes to decode, (...).

        Returns:
            (..., 4).
        """
        points, distances = points[index], distances[index]
        decoded = torch.cat([points - distances[..., :2], points + distances[..., 2:]], -1)
        return decoded if coder.clip_border is False else clip(decoded, limits)

    def draw_masks(self, head: nn.Module, prototypes: Tensor, kernels: Tensor, points: Tensor) -> Tensor:
        """Draws the mask logits (n, h, w) of objects by a small convolutional network of each.

        Args:
            head: The RTMDetInsHead.
            prototypes: The common map, (C, h, w).
            kernels: Weights and biases of the networks, (n, parameters).
            points: The point of each object, and its strides, (n, 4).
        """
        return head._mask_predict_by_feat_single(prototypes, kernels, points)

    def stride(self, corners: Tensor, scores: Tensor) -> Tensor:
        """Distance between the offsets of consecutive groups in mmcv's batched NMS: the largest coordinate plus 1."""
        corners = torch.where((scores > EMPTY)[..., None], corners, 0.0)
        # Without boxes, the largest coordinate is 0.
        return torch.cat([corners.reshape(-1), corners.new_zeros(1)]).max() + 1


def to_rows(x: Tensor, channels: int) -> Tensor:
    """Reshapes maps (N, n * channels, H, W) to one row per anchor, (N * H * W * n, channels)."""
    return x.permute(0, 2, 3, 1).reshape(-1, channels)


def clip(corners: Tensor, limits: Tensor) -> Tensor:
    """Clips corners (..., 4) to the image."""
    return torch.minimum(corners.clamp(min=0), limits)


def map_levels(extractor: SingleRoIExtractor, boxes: Tensor) -> Tensor:
    """Returns the level of the pyramid, (n,), from which each box (n, 4) is pooled."""
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    # The epsilon stands inside the log: log2(0), of a box without area, is -inf, which no integer holds.
    level = torch.log2(scale / extractor.finest_scale + 1e-6).floor()
    return level.clamp(0, len(extractor.roi_layers) - 1).to(torch.int64)


@constant(256)
def numbers(values: tuple, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a cached tensor of these numbers: during a capture, numbers cannot be copied to the GPU."""
    return torch.tensor(values, dtype=dtype, device=device)


def offset_groups(corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor) -> Tensor:
    """Moves boxes (..., 4) of different groups apart by an offset of each group, rounded as in mmcv's batched NMS.

    Empty slots get boxes without area, which suppress nothing.
    """
    moved = corners + (groups.to(corners.dtype) * stride)[..., None]
    return torch.where((scores > EMPTY)[..., None], moved, 0.0)


# Each takes 3 to 4 MB at 800x1333. A capture reads those that its warm-up made, and its graph keeps them alive.
@constant(16)
def anchors(generator: PriorGenerator, sizes: tuple, device: torch.device) -> Tensor:
    """Returns the anchors (A, 4) or points (A, 2) of all levels for feature maps of these sizes."""
    return torch.cat(generator.grid_priors(sizes, torch.float32, device))


def can_pool(extractor: SingleRoIExtractor) -> bool:
    """Whether :meth:`BoxOperators.pool` computes what the extractor does: mmdet's own RoIAlign, on up to 4 levels."""
    layers, bins = extractor.roi_layers, extractor.roi_layers[0].output_size[0]
    options = {(layer.output_size, layer.sampling_ratio, layer.aligned) for layer in layers}
    return len(layers) <= 4 and options == {((bins, bins), 0, True)}
