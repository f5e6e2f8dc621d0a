"""Rank of attention maps (SLAB, Guo et al., ICML 2024, Figure 3), with and without the depthwise convolution.

Linear attention is a product of N x d features, normalised by rows: its rank is at most d, however many tokens
there are. The depthwise convolution of the values adds a banded matrix of high rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import mmcv
import numpy as np
import torch
from torch import Tensor, nn

from slab_det.attention.attention_matrix import attention_matrices, without_convolution
from slab_det.attention.geometry import WindowGeometry
from slab_det.attention.linear import LinearAttention
from slab_det.attention.spatial_reduction import MAP_ATTENTIONS, MapAttention
from slab_det.attention.window_attention import ATTENTIONS, WindowAttention
from slab_det.data.synthetic import draw_image
from slab_det.runtime.errors import AttentionRankError

SYNTHETIC = 'a generated image'


@dataclass(frozen=True)
class MapRank:
    """The ranks of one attention map in some channels of a head.

    Attributes:
        matrix: (N, M), that of the channel whose effective rank is the (upper) median.
        singular_values: Of that matrix, falling.
        envelope: (2, min(N, M)): least and largest i-th singular value over the channels, each over the channel's
            own largest.
        effective_ranks: One per channel.
        numerical_ranks: One per channel.
    """

    matrix: Tensor
    singular_values: Tensor
    envelope: Tensor
    effective_ranks: tuple[float, ...]
    numerical_ranks: tuple[int, ...]

    def to_dict(self) -> dict:
        """All but the matrix, as JSON types."""
        return {
            'effective_rank': float(np.median(self.effective_ranks)),
            'numerical_rank': float(np.median(self.numerical_ranks)),
            'effective_ranks': list(self.effective_ranks),
            'numerical_ranks': list(self.numerical_ranks),
            'singular_values': self.singular_values.tolist(),
        }


@dataclass(frozen=True)
class AttentionRank:
    """The maps of one head on one image.

    Attributes:
        kind: 'softmax', 'sla' or 'focused'.
        stage: Index of the stage.
        block: Index of the block in it.
        head: Index of the head.
        window: Index of the window, in reading order after the shift; None for attention over the whole map.
        shape: (H, W) of the tokens in it.
        padding: How many of the tokens are padding.
        head_dims: Channels d of the head: the bound of a linear map's rank.
        alone: The attention without the convolution: its channels share one matrix.
        convolved: The sum of both; None for softmax attention, which has no convolution.
    """

    kind: str
    stage: int
    block: int
    head: int
    window: int | None
    shape: tuple[int, int]
    padding: int
    head_dims: int
    alone: MapRank
    convolved: MapRank | None

    def to_dict(self) -> dict:
        """As JSON types, without the matrices."""
        maps = {name: found and found.to_dict() for name, found in self.maps.items()}
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in self.maps}
        return {**fields, 'shape': list(self.shape), 'tokens': list(self.alone.matrix.shape), **maps}

    @property
    def maps(self) -> dict[str, MapRank | None]:
        """Both maps by name."""
        return {'alone': self.alone, 'convolved': self.convolved}


def effective_rank(singular_values: Tensor) -> float:
    """``exp(-sum_i p_i log p_i)`` with ``p = sigma / sum(sigma)`` (Roy and Vetterli, EUSIPCO 2007).

    1 for a matrix of rank one, n for n equal singular values; 0 for a matrix of zeros.
    """
    total = singular_values.sum()
    if total == 0:
        return 0.0
    share = singular_values / total
    return float(torch.special.entr(share).sum().exp())


def numerical_rank(singular_values: Tensor, shape: tuple[int, int]) -> int:
    """Singular values above ``max(shape) * eps * sigma_1``, as ``numpy.linalg.matrix_rank`` counts them."""
    tolerance = max(shape) * torch.finfo(singular_values.dtype).eps * singular_values.max()
    return int((singular_values > tolerance).sum())


@torch.no_grad()
def measure_attention_rank(
    backbone: nn.Module,
    inputs: Tensor,
    stage: int = 0,
    block: int = 0,
    head: int = 0,
    window: int | None = None,
    num_channels: int = 8,
) -> AttentionRank:
    """The attention maps of one head, as matrices, and their ranks; all in float64.

    Args:
        backbone: SLABSwin or SLABPVT, fused or not; it becomes float64 and goes to eval mode.
        inputs: A normalised image, (1, 3, H, W).
        stage: Index of the stage.
        block: Index of the block in it.
        head: Index of the head.
        window: Index of the window in reading order; None is the middle one. None for attention over whole maps.
        num_channels: How many channels of the head, evenly spaced, have their convolution written out: each has a
            matrix of its own, and the singular values of one with N = 3136 take 10 s of a CPU core.

    Raises:
        AttentionRankError: If the backbone has no such attention, head or window.
    """
    backbone.double().eval()
    attention = _find_attention(backbone, stage, block)
    if not 0 <= head < attention.num_heads:
        raise AttentionRankError(f'stage {stage}, block {block} has heads 0 to {attention.num_heads - 1}, not {head}')
    select = _one_window_of if isinstance(attention, WindowAttention) else _whole_map_of
    call = select(attention, _record(attention, lambda: backbone(inputs.double())), window)
    channels = torch.linspace(0, attention.head_dims - 1, min(num_channels, attention.head_dims)).long()
    channels = (channels + head * attention.head_dims).tolist()
    is_linear = isinstance(attention, LinearAttention)
    alone = without_convolution(attention) if is_linear else attention
    return AttentionRank(
        kind=_kind(attention),
        stage=stage,
        block=block,
        head=head,
        window=call.window,
        shape=call.shape,
        padding=call.padding,
        head_dims=attention.head_dims,
        alone=_map_rank(attention_matrices(call.mixer(alone), call.values, channels[:1]).matrices),
        convolved=(
            _map_rank(attention_matrices(call.mixer(attention), call.values, channels).matrices) if is_linear else None
        ),
    )


def rank_table(results: Mapping[str, AttentionRank], image: str) -> str:
    """A Markdown table of results by title, with the scope of its numbers below it."""
    lines = ['| model | map | tokens | effective rank | numerical rank |', '|---|---|---:|---:|---:|']
    for title, result in results.items():
        for name, found in result.maps.items():
            if found is not None:
                label = result.kind if name == 'alone' else f'{result.kind} + depthwise convolution'
                lines.append(
                    f'| {title} | {label} | {result.alone.matrix.shape[0]} '
                    f'| {_spread(found.effective_ranks, ".1f")} | {_spread(found.numerical_ranks, ".0f")} |'
                )
    first = next(iter(results.values()))
    return '\n'.join(
        [
            *lines,
            '',
            f'On {image}; stage {first.stage}, block {first.block}, head {first.head}; float64. '
            'Median (least to most) over channels of the head where the convolution gives each its own map.',
            'Effective rank: exp of the entropy of the singular values over their sum (Roy and Vetterli, 2007); '
            'numerical rank: those above N * eps * the largest.',
        ]
    )


def load_image(preprocess: nn.Module, image: str | None, size: tuple[int, int]) -> Tensor:
    """An image as the backbone takes it.

    Args:
        preprocess: The detector's ``data_preprocessor``.
        image: Path; None draws one of the quick start's.
        size: (height, width) that it is resized to.

    Returns:
        (1, 3, H, W), normalised and padded.

    Raises:
        AttentionRankError: If it cannot be read.
    """
    if image is None:
        # The stream of the first validation image.
        pixels, _ = draw_image(np.random.default_rng([0, 1, 0]), (size[1], size[0]))
    else:
        try:
            pixels = mmcv.imread(image)
        except FileNotFoundError as error:
            raise AttentionRankError(f'image {image} not found') from error
        if pixels is None:
            raise AttentionRankError(f'image {image} cannot be decoded; give a JPEG or PNG file')
        pixels = mmcv.imresize(pixels, (size[1], size[0]))
    tensor = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    return preprocess({'inputs': [tensor]}, training=False)['inputs']


@dataclass(frozen=True)
class _Call:
    """What one attention was called with, cut down to one window of one image.

    Attributes:
        q: Queries, (1, N, C).
        k: Keys, (1, M, C).
        values: (M, C).
        rest: What else it takes.
        method: The name of the method that was called.
        shape: (H, W) of the queries.
        window: Index of the window.
        padding: Padding tokens among them.
    """

    q: Tensor
    k: Tensor
    values: Tensor
    rest: tuple
    method: str
    shape: tuple[int, int]
    window: int | None = None
    padding: int = 0

    def mixer(self, attention: nn.Module) -> Callable[[Tensor], Tensor]:
        """The attention as a function of its values (B, M, C)."""
        # repeat: linear attention may overwrite its queries.
        return lambda values: getattr(attention, self.method)(
            self.q.repeat(len(values), 1, 1), self.k.repeat(len(values), 1, 1), values, *self.rest
        )


def _find_attention(backbone: nn.Module, stage: int, block: int) -> WindowAttention | MapAttention:
    stages = getattr(backbone, 'stages', None) or getattr(backbone, 'layers', None) or []
    if not 0 <= stage < len(stages):
        raise AttentionRankError(f'{type(backbone).__name__} has no stage {stage}; it has {len(stages)}')
    found = [module for module in stages[stage].modules() if isinstance(module, WindowAttention | MapAttention)]
    if not found:
        raise AttentionRankError(
            f'stage {stage} of {type(backbone).__name__} has no attention of slab_det; use SLABSwin or SLABPVT, which '
            'load the same weights'
        )
    if not 0 <= block < len(found):
        raise AttentionRankError(f'stage {stage} has blocks 0 to {len(found) - 1}, not {block}')
    return found[block]


def _kind(attention: WindowAttention | MapAttention) -> str:
    """What configs call it."""
    classes = [*ATTENTIONS.items(), *MAP_ATTENTIONS.items()]
    return next(word for word, kind in classes if isinstance(attention, kind))


def _method(attention: WindowAttention | MapAttention) -> str:
    """The name of the method that takes q, k, v and what else there is, and mixes the values."""
    return 'forward' if isinstance(attention, WindowAttention) else 'mix'


def _record(attention: nn.Module, run: Callable[[], object]) -> tuple:
    """The arguments that ``run`` calls the attention's method with."""
    method = _method(attention)
    original, calls = getattr(attention, method), []

    def record(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
        # Linear attention may overwrite its queries.
        calls.append((q.clone(), k.clone(), v.clone(), *rest))
        return original(q, k, v, *rest)

    setattr(attention, method, record)
    try:
        run()
    finally:
        delattr(attention, method)
    return calls[0]


def _one_window_of(attention: WindowAttention, call: tuple, window: int | None) -> _Call:
    q, k, v, geometry, shifted = call
    window = geometry.num_windows // 2 if window is None else window
    if not 0 <= window < geometry.num_windows:
        raise AttentionRankError(f'the map has windows 0 to {geometry.num_windows - 1}, not {window}')
    alone = _one_window(geometry, window)
    return _Call(
        q[window : window + 1],
        k[window : window + 1],
        v[window],
        (alone, shifted),
        _method(attention),
        (geometry.window_size,) * 2,
        window,
        alone.padding_slots.numel(),
    )


def _whole_map_of(attention: MapAttention, call: tuple, window: int | None) -> _Call:
    q, k, v, hw_shape, source_shape = call
    if window is not None:
        raise AttentionRankError(f'{type(attention).__name__} attends over the whole map: it has no windows')
    return _Call(q[:1], k[:1], v[0], (hw_shape, source_shape), _method(attention), hw_shape)


def _one_window(geometry: WindowGeometry, window: int) -> WindowGeometry:
    """The geometry of a map that is this window alone."""
    num_slots = geometry.window_size**2
    slots = geometry.padding_slots - window * num_slots
    return replace(
        geometry,
        num_windows=1,
        index=geometry.index[window * num_slots : (window + 1) * num_slots],
        padding_slots=slots[(slots >= 0) & (slots < num_slots)],
        regions=geometry.regions[window : window + 1],
    )


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = (format(value, form) for value in (np.median(values), min(values), max(values)))
    return middle if low == high else f'{middle} ({low} to {high})'


def _map_rank(matrices: Tensor) -> MapRank:
    singular_values = torch.linalg.svdvals(matrices)
    effective = [effective_rank(values) for values in singular_values]
    middle = sorted(range(len(effective)), key=effective.__getitem__)[len(effective) // 2]
    relative = singular_values / singular_values[:, :1].clamp(min=torch.finfo(matrices.dtype).tiny)
    return MapRank(
        matrices[middle],
        singular_values[middle],
        torch.stack([relative.amin(0), relative.amax(0)]),
        tuple(effective),
        tuple(numerical_rank(values, matrices.shape[1:]) for values in singular_values),
    )
