"""Box operators that never wait for the GPU: their tensors have a slot for every possible box.

In the kernels, boxes are corners (x1, y1, x2, y2) in float32. A slot whose score is -1 (``EMPTY``) has no box.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from torch import Tensor, nn

from slab_det.families.operators import (
    EMPTY,
    MAX_LOG_RATIO,
    BoxOperators,
    PriorGenerator,
    anchors,
    map_levels,
    numbers,
)
from slab_det.inference.gpu.kernels import triton

# The most boxes, over all classes, that NMS reads. A CUDA graph reports whether more boxes passed the threshold.
CANDIDATES = 4096

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _or(a, b):
        return a | b

    @triton.jit
    def _moved_boxes(corners, scores, groups, stride, index, known):
        # Loads 64 boxes, moved apart by `groups`, and whether any box is there. Empty slots get boxes without area.
        known = known & (tl.load(scores + index, mask=known, other=-1.0) != -1.0)
        move = tl.load(groups + index, mask=known, other=0).to(tl.float32) * tl.load(stride)
        x1 = tl.where(known, tl.load(corners + index * 4, mask=known, other=0.0) + move, 0.0)
        y1 = tl.where(known, tl.load(corners + index * 4 + 1, mask=known, other=0.0) + move, 0.0)
        x2 = tl.where(known, tl.load(corners + index * 4 + 2, mask=known, other=0.0) + move, 0.0)
        y2 = tl.where(known, tl.load(corners + index * 4 + 3, mask=known, other=0.0) + move, 0.0)
        return x1, y1, x2, y2, tl.max(known.to(tl.int32), 0)

    @triton.jit
    def _overlap_kernel(corners, scores, groups, stride, words, threshold, K, W):
        # Compares 64 boxes with 64 boxes of a batch: bit j of the word of row i says that box i suppresses box j.
        # Words of tiles without a box are neither written nor read.
        batch, row_block, column_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        if column_block >= row_block:
            row, column = row_block * 64 + tl.arange(0, 64), column_block * 64 + tl.arange(0, 64)
            ax1, ay1, ax2, ay2, some_a = _moved_boxes(corners, scores, groups, stride, batch * K + row, row < K)
            bx1, by1, bx2, by2, some_b = _moved_boxes(corners, scores, groups, stride, batch * K + column, column < K)
            if (some_a > 0) & (some_b > 0):
                width = tl.minimum(ax2[:, None], bx2[None, :]) - tl.maximum(ax1[:, None], bx1[None, :])
                height = tl.minimum(ay2[:, None], by2[None, :]) - tl.maximum(ay1[:, None], by1[None, :])
                common = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
                area_a, area_b = (ax2 - ax1) * (ay2 - ay1), (bx2 - bx1) * (by2 - by1)
                union = area_a[:, None] + area_b[None, :] - common
                suppressed = (tl.math.div_rn(common, union) > threshold) & (column[None, :] > row[:, None])
                bit = tl.full([64, 64], 1, tl.int64) << tl.arange(0, 64).to(tl.int64)[None, :]
                # The bits are distinct, so that their sum is their bitwise or.
                word = tl.sum(tl.where(suppressed, bit, 0), 1)
                tl.store(words + (batch * K + row) * W + column_block, word, mask=row < K)

    @triton.jit
    def _scan_kernel(words, scores, kept, limit, K, W, LANES: tl.constexpr, SCORES: tl.constexpr):
        # Suppresses the boxes of a batch, 64 at a time: first within the 64, then the later boxes that they overlap.
        # Bit j of the words of `kept` says that box j is kept.
        batch = tl.program_id(0)
        index, lane, bits = tl.arange(0, SCORES), tl.arange(0, LANES), tl.arange(0, 64).to(tl.int64)
        given = tl.load(scores + batch * K + index, mask=index < K, other=-1.0)
        count = tl.max(tl.where(given != -1.0, index + 1, 0), 0)
        removed = tl.zeros([LANES], tl.int64)
        one = tl.full([], 1, tl.int64)
        block, found = 0, one * 0
        # At most `limit` boxes of all batches together are kept, so no single batch needs more than `limit`.
        while (block * 64 < count) & (found < limit):
            rows = block * 64 + tl.arange(0, 64)
            there = tl.load(scores + batch * K + rows, mask=rows < K, other=-1.0) != -1.0
            gone = tl.sum(tl.where(lane == block, removed, 0), 0) | ~tl.sum(tl.where(there, one << bits, 0), 0)
            keep = one * 0
            for i in tl.static_range(64):
                row = tl.minimum(block * 64 + i, K - 1)
                own = tl.load(words + (batch * K + row) * W + block)
                free = ((gone >> i) & 1) == 0
                keep = tl.where(free, keep | (one << i), keep)
                gone = tl.where(free, gone | own, gone)
            tl.store(kept + batch * W + block, keep)
            alive = ((keep >> bits) & 1) == 1
            found += tl.sum(tl.where(alive, one, 0), 0)
            behind = alive[:, None] & (lane[None, :] > block) & (lane[None, :] * 64 < count)
            tile = tl.load(words + (batch * K + rows)[:, None] * W + lane[None, :], mask=behind, other=0)
            removed = removed | tl.reduce(tile, 0, _or)
            block += 1
        tl.store(kept + batch * W + lane, tl.zeros([LANES], tl.int64), mask=(lane >= block) & (lane < W))

    @triton.jit
    def _kept_scores(scores, kept, index, K, W, N):
        # Loads the scores of these boxes; suppressed boxes get -1.
        known = index < N
        word = tl.load(kept + (index // K) * W + (index % K) // 64, mask=known, other=0)
        stays = ((word >> (index % K % 64).to(tl.int64)) & 1) == 1
        return tl.where(stays, tl.load(scores + index, mask=known, other=-1.0), -1.0)

    @triton.jit
    def _rank_kernel(scores, kept, out_scores, out_place, K, W, N, limit, OWN: tl.constexpr, OTHERS: tl.constexpr):
        # Writes OWN boxes at their ranks among the boxes of all batches, up to the limit. The rank of a box is the
        # number of better boxes plus the number of equal boxes before it.
        index = tl.program_id(0) * OWN + tl.arange(0, OWN)
        score = _kept_scores(scores, kept, index, K, W, N)
        # A NaN score ranks first.
        key = tl.where(score == score, score, float('inf'))
        rank = tl.zeros([OWN], tl.int32)
        for start in range(0, N, OTHERS):
            other = start + tl.arange(0, OTHERS)
            value = _kept_scores(scores, kept, other, K, W, N)
            value = tl.where(value == value, value, float('inf'))
            equal = (value[None, :] == key[:, None]) & (other[None, :] < index[:, None])
            before = ((value[None, :] > key[:, None]) | equal) & (other[None, :] < N)
            rank += tl.sum(before.to(tl.int32), 1)
        chosen = (index < N) & (rank < limit)
        tl.store(out_scores + rank, score, mask=chosen)
        tl.store(out_place + rank, index.to(tl.int64), mask=chosen)

    @triton.jit
    def _stride_kernel(corners, scores, stride, N, BLOCK: tl.constexpr):
        # Raises the stride to 1 plus the largest coordinate of BLOCK boxes, or to infinity if a coordinate is NaN.
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        there = (index < N) & (tl.load(scores + index, mask=index < N, other=-1.0) > -1.0)
        x1 = tl.load(corners + index * 4, mask=there, other=0.0)
        y1 = tl.load(corners + index * 4 + 1, mask=there, other=0.0)
        x2 = tl.load(corners + index * 4 + 2, mask=there, other=0.0)
        y2 = tl.load(corners + index * 4 + 3, mask=there, other=0.0)
        largest = tl.maximum(tl.maximum(x1, y1), tl.maximum(x2, y2))
        # tl.maximum ignores NaN, and a sum does not.
        total = x1 + y1 + x2 + y2
        largest = tl.max(tl.where(total == total, largest, float('inf')), 0)
        tl.atomic_max(stride, largest + 1.0)

    @triton.jit
    def _class_scores_kernel(logits, found, out, score_thr, ROW, C: tl.constexpr, CLASSES: tl.constexpr):
        # Applies softmax to the logits of one region, the last for the background; scores up to score_thr become -1.
        row, column = tl.program_id(0), tl.arange(0, CLASSES)
        x = tl.load(logits + row * ROW + column, mask=column <= C, other=float('-inf'))
        e = tl.exp(x - tl.max(x, 0))
        score = e / tl.sum(e, 0)
        threshold = tl.where(tl.load(found + row) > -1.0, score_thr, 2.0)
        tl.store(out + row * C + column, tl.where(score > threshold, score, -1.0), mask=column < C)

    @triton.jit
    def _decode_kernel(
        priors, values, index, limits, out, N, m0, m1, m2, m3, s0, s1, s2, s3, clamp, ROW,
        PER: tl.constexpr, AT: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        # Decodes BLOCK boxes: with AT the boxes of the anchors at `index`, without AT the PER boxes of each proposal.
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        known = i < N
        if AT:
            prior = tl.load(index + i, mask=known, other=0)
            value = values + prior * 4
        else:
            prior = i // PER
            value = values + prior * ROW + (i % PER) * 4
        a = tl.load(value, mask=known, other=0.0).to(tl.float32)
        b = tl.load(value + 1, mask=known, other=0.0).to(tl.float32)
        c = tl.load(value + 2, mask=known, other=0.0).to(tl.float32)
        d = tl.load(value + 3, mask=known, other=0.0).to(tl.float32)
        px1 = tl.load(priors + prior * 4, mask=known, other=0.0)
        py1 = tl.load(priors + prior * 4 + 1, mask=known, other=0.0)
        px2 = tl.load(priors + prior * 4 + 2, mask=known, other=0.0)
        py2 = tl.load(priors + prior * 4 + 3, mask=known, other=0.0)
        a, b, c, d = a * s0 + m0, b * s1 + m1, c * s2 + m2, d * s3 + m3
        c, d = tl.minimum(tl.maximum(c, -clamp), clamp), tl.minimum(tl.maximum(d, -clamp), clamp)
        x, y = (px1 + px2) * 0.5 + (px2 - px1) * a, (py1 + py2) * 0.5 + (py2 - py1) * b
        w, h = (px2 - px1) * tl.exp(c) * 0.5, (py2 - py1) * tl.exp(d) * 0.5
        x1, y1, x2, y2 = x - w, y - h, x + w, y + h
        if CLIP:
            # tl.minimum and tl.maximum would drop NaN.
            width, height = tl.load(limits), tl.load(limits + 1)
            x1 = tl.where(x1 == x1, tl.minimum(tl.maximum(x1, 0.0), width), x1)
            x2 = tl.where(x2 == x2, tl.minimum(tl.maximum(x2, 0.0), width), x2)
            y1 = tl.where(y1 == y1, tl.minimum(tl.maximum(y1, 0.0), height), y1)
            y2 = tl.where(y2 == y2, tl.minimum(tl.maximum(y2, 0.0), height), y2)
        tl.store(out + i * 4, x1, mask=known)
        tl.store(out + i * 4 + 1, y1, mask=known)
        tl.store(out + i * 4 + 2, x2, mask=known)
        tl.store(out + i * 4 + 3, y2, mask=known)

    @triton.jit
    def _bilinear(feature, top, bottom, left, right, W, channel, C: tl.constexpr, w00, w01, w10, w11):
        known = channel < C
        a = tl.load(feature + (top * W + left) * C + channel, mask=known, other=0.0).to(tl.float32)
        b = tl.load(feature + (top * W + right) * C + channel, mask=known, other=0.0).to(tl.float32)
        c = tl.load(feature + (bottom * W + left) * C + channel, mask=known, other=0.0).to(tl.float32)
        d = tl.load(feature + (bottom * W + right) * C + channel, mask=known, other=0.0).to(tl.float32)
        return a * w00 + b * w01 + c * w10 + d * w11

    @triton.jit
    def _roi_align_kernel(
        f0, f1, f2, f3, boxes, levels, out,
        H0, W0, H1, W1, H2, W2, H3, W3, s0, s1, s2, s3,
        C: tl.constexpr, CHANNELS: tl.constexpr, BINS: tl.constexpr,
    ):  # fmt: skip
        # Averages the samples of one bin of one box, in all channels. Coordinates are always float32.
        box, bin = tl.program_id(0), tl.program_id(1)
        level = tl.load(levels + box)
        H = tl.where(level == 0, H0, tl.where(level == 1, H1, tl.where(level == 2, H2, H3)))
        W = tl.where(level == 0, W0, tl.where(level == 1, W1, tl.where(level == 2, W2, W3)))
        scale = tl.where(level == 0, s0, tl.where(level == 1, s1, tl.where(level == 2, s2, s3)))
        x1 = tl.load(boxes + box * 4) * scale - 0.5
        y1 = tl.load(boxes + box * 4 + 1) * scale - 0.5
        width = tl.load(boxes + box * 4 + 2) * scale - 0.5 - x1
        height = tl.load(boxes + box * 4 + 3) * scale - 0.5 - y1
        step_x, step_y = width / BINS, height / BINS
        columns, rows = tl.ceil(step_x).to(tl.int32), tl.ceil(step_y).to(tl.int32)
        channel = tl.arange(0, CHANNELS)
        sum = tl.zeros([CHANNELS], tl.float32)
        for row in range(0, rows):
            y = y1 + (bin // BINS) * step_y + (row + 0.5) * step_y / rows
            seen_y = (y >= -1.0) & (y <= H)
            y = tl.minimum(tl.maximum(y, 0.0), (H - 1) * 1.0)
            top = tl.floor(y).to(tl.int32)
            bottom = tl.minimum(top + 1, H - 1)
            dy = y - top
            for column in range(0, columns):
                x = x1 + (bin % BINS) * step_x + (column + 0.5) * step_x / columns
                seen = tl.where(seen_y & (x >= -1.0) & (x <= W), 1.0, 0.0)
                x = tl.minimum(tl.maximum(x, 0.0), (W - 1) * 1.0)
                left = tl.floor(x).to(tl.int32)
                right = tl.minimum(left + 1, W - 1)
                dx = x - left
                w00, w01 = seen * (1 - dy) * (1 - dx), seen * (1 - dy) * dx
                w10, w11 = seen * dy * (1 - dx), seen * dy * dx
                if level == 0:
                    value = _bilinear(f0, top, bottom, left, right, W, channel, C, w00, w01, w10, w11)
                elif level == 1:
                    value = _bilinear(f1, top, bottom, left, right, W, channel, C, w00, w01, w10, w11)
                elif level == 2:
                    value = _bilinear(f2, top, bottom, left, right, W, channel, C, w00, w01, w10, w11)
                else:
                    value = _bilinear(f3, top, bottom, left, right, W, channel, C, w00, w01, w10, w11)
                sum += value
        mean = sum / tl.maximum(rows * columns, 1)
        tl.store(out + (box * BINS * BINS + bin) * C + channel, mean.to(out.dtype.element_ty), mask=channel < C)


class FixedOperators(BoxOperators):
    """Box operators as kernels on float32 tensors of fixed shapes, which never wait for the GPU."""

    def priors(self, generator: PriorGenerator, sizes: Sequence[tuple], like: Tensor) -> Tensor:
        return anchors(generator, tuple(sizes), like.device)

    def topk(self, levels: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes, device = tuple(len(level) for level in levels), levels[0].device
        width = max(sizes)
        count = min(count, width) if count > 0 else width
        # One topk ranks all levels.
        rows = levels[0].new_full((len(levels), width), -torch.inf)
        for row, level in zip(rows, levels, strict=True):
            row[: len(level)] = level
        scores, index = rows.topk(count)
        there = torch.arange(count, device=device) < numbers(sizes, device, torch.float32)[:, None]
        scores, index = torch.where(there, scores.sigmoid(), EMPTY), torch.where(there, index, 0)
        starts = numbers(tuple(sum(sizes[:i]) for i in range(len(sizes))), device, torch.int64)
        level = numbers(tuple(range(len(sizes))), device, torch.float32)[:, None].expand_as(scores)
        return scores, index + starts[:, None], level

    def candidates(self, scores: Tensor, corners: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        count, stride = min(CANDIDATES, len(scores)), self.stride(corners, scores)
        best, index = scores.topk(count)
        return corners[index], best, index, stride, (scores > EMPTY).sum() <= count

    def suppress(
        self, corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor, iou_threshold: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        rows, size = scores.shape
        total, num_words, device = rows * size, triton.cdiv(size, 64), scores.device
        limit = min(limit, total) if limit > 0 else total
        corners, scores, groups = corners.contiguous(), scores.contiguous(), groups.contiguous()
        words = torch.empty(rows, size, num_words, dtype=torch.int64, device=device)
        kept = torch.empty(rows, num_words, dtype=torch.int64, device=device)
        _overlap_kernel[(rows, num_words, num_words)](
            corners, scores, groups, stride, words, iou_threshold, size, num_words
        )
        lanes, padded = triton.next_power_of_2(num_words), triton.next_power_of_2(size)
        _scan_kernel[(rows,)](
            words, scores, kept, limit, size, num_words, LANES=lanes, SCORES=padded, num_warps=4 if lanes > 16 else 1
        )
        best = torch.empty(limit, dtype=scores.dtype, device=device)
        index = torch.empty(limit, dtype=torch.int64, device=device)
        _rank_kernel[(triton.cdiv(total, 16),)](
            scores, kept, best, index, size, num_words, total, limit, OWN=16, OTHERS=512
        )
        return best, index

    def class_scores(self, logits: Tensor, found: Tensor, score_thr: float) -> Tensor:
        rows, columns = logits.shape
        out = torch.empty(rows, columns - 1, dtype=torch.float32, device=logits.device)
        classes = triton.next_power_of_2(columns)
        _class_scores_kernel[(rows,)](
            logits, found, out, score_thr, logits.stride(0), C=columns - 1, CLASSES=classes, num_warps=1
        )
        return out

    def decode(
        self, coder: nn.Module, priors: Tensor, deltas: Tensor, limits: Tensor, index: Tensor | None = None
    ) -> Tensor:
        deltas = deltas if deltas.stride()[-2:] == (4, 1) else deltas.contiguous()
        shape = deltas.shape if index is None else (*index.shape, 4)
        out = torch.empty(shape, dtype=torch.float32, device=deltas.device)
        total, scales = out.numel() // 4, (*map(float, coder.means), *map(float, coder.stds))
        _decode_kernel[(triton.cdiv(total, 128),)](
            priors.contiguous(), deltas, priors if index is None else index.contiguous(), limits, out, total, *scales,
            MAX_LOG_RATIO, deltas.stride(0), PER=1 if index is not None else shape[1], AT=index is not None,
            CLIP=bool(coder.clip_border), BLOCK=128, num_warps=1,
        )  # fmt: skip
        return out

    def stride(self, corners: Tensor, scores: Tensor) -> Tensor:
        """See :meth:`BoxOperators.stride`; corners are not negative."""
        out = torch.ones((), dtype=torch.float32, device=scores.device)
        total = scores.numel()
        _stride_kernel[(triton.cdiv(total, 1024),)](corners.contiguous(), scores.contiguous(), out, total, BLOCK=1024)
        return out

    def pool(
        self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor, scores: Tensor
    ) -> tuple[Tensor, None]:
        """See :meth:`BoxOperators.pool`; regions are channels last, in the dtype of the maps."""
        layers, channels = extractor.roi_layers, features[0].shape[1]
        bins, scales, missing = layers[0].output_size[0], [layer.spatial_scale for layer in layers], 4 - len(layers)
        # Empty slots get boxes without area, which need no samples.
        boxes = torch.where((scores > EMPTY)[:, None], boxes, 0.0)
        levels = map_levels(extractor, boxes)
        maps = [x.permute(0, 2, 3, 1).contiguous() for x in features[: len(layers)]]
        sizes = [side for x in [*maps, *[maps[-1]] * missing] for side in x.shape[1:3]]
        out = torch.empty(len(boxes), bins, bins, channels, device=boxes.device, dtype=features[0].dtype)
        _roi_align_kernel[(len(boxes), bins * bins)](
            *maps, *[maps[-1]] * missing, boxes.contiguous(), levels.int(), out, *sizes, *scales,
            *[scales[-1]] * missing, C=channels, CHANNELS=triton.next_power_of_2(channels), BINS=bins,
        )  # fmt: skip
        return out.permute(0, 3, 1, 2), None
