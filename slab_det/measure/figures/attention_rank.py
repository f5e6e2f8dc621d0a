"""Attention maps and their spectra (SLAB, Guo et al., ICML 2024, Figure 3): one row per backbone."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure

from slab_det.measure.attention_rank import AttentionRank, MapRank
from slab_det.measure.figures.labels import FONT_SIZE, wrap

_WIDTH = 7.2  # inches: the text width of A4
_FLOOR = 1e-5  # of the largest singular value; below lies nothing that an output would show


def draw_attention_rank(results: Mapping[str, AttentionRank], image: str, path: str | Path) -> None:
    """Draws, per result, the map without and with the depthwise convolution, and the spectra of both.

    Maps show ``|weight|`` of query (row) and value (column) in grey, on one logarithmic scale for all rows. The
    convolution has one kernel per channel: the map is that of the channel whose effective rank is the median, and a
    band spans the spectra of all channels that were measured.

    Args:
        results: By title, which says what the weights are.
        image: What the maps were computed on, in words.
        path: The PNG to write.
    """
    figure = attention_rank_figure(results, image)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def attention_rank_figure(results: Mapping[str, AttentionRank], image: str) -> Figure:
    """The picture of :func:`draw_attention_rank`, not yet written."""
    figure = Figure(figsize=(_WIDTH, 3.0 * len(results) + 0.9), dpi=200, layout='constrained')
    FigureCanvasAgg(figure)
    figure.suptitle(wrap(f'Attention maps on {image}; float64', 95), fontsize=FONT_SIZE + 1)
    subfigures = figure.subfigures(len(results) + 1, 1, height_ratios=[3.0] * len(results) + [0.55])
    # White is a hundredth of uniform attention.
    norm = LogNorm(0.01 / max(result.alone.matrix.shape[1] for result in results.values()), 1.0, clip=True)
    for part, (title, result) in zip(subfigures, results.items(), strict=False):
        part.suptitle(f'{title}\n{_place(result)}', fontsize=FONT_SIZE)
        _draw_row(part, result, norm)
    scale = subfigures[-1].subplots()
    bar = subfigures[-1].colorbar(ScalarMappable(norm, 'gray_r'), cax=scale, orientation='horizontal', extend='both')
    bar.set_label('|weight| of a value (column) for a query (row)', fontsize=FONT_SIZE)
    bar.ax.tick_params(labelsize=FONT_SIZE)
    return figure


def _place(result: AttentionRank) -> str:
    where = f'stage {result.stage}, block {result.block}, head {result.head}'
    height, width = result.shape
    tokens = f'{height}x{width} tokens' + ('' if result.window is None else f' of window {result.window}')
    tokens += f' ({result.padding} of padding)' if result.padding else ''
    return f'{where}, {tokens}, d = {result.head_dims}'


def _draw_row(figure: SubFigure, result: AttentionRank, norm: LogNorm) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.05])
    _draw_map(left, result.alone, f'{result.kind} attention', norm)
    if result.convolved is None:
        middle.axis('off')
        middle.text(0.5, 0.5, 'no convolution\nof the values', ha='center', va='center', fontsize=FONT_SIZE)
    else:
        _draw_map(middle, result.convolved, f'{result.kind} + depthwise conv.', norm)
    _draw_spectra(right, result)


def _draw_map(axes: Axes, found: MapRank, title: str, norm: LogNorm) -> None:
    axes.imshow(found.matrix.abs().clamp(min=norm.vmin).numpy(), cmap='gray_r', norm=norm, aspect='equal')
    size = min(found.matrix.shape)
    axes.set_title(
        f'{title}\neffective rank {np.median(found.effective_ranks):.1f} of {size}\n'
        f'numerical rank {np.median(found.numerical_ranks):.0f}',
        fontsize=FONT_SIZE,
    )
    axes.tick_params(labelsize=FONT_SIZE)
    axes.locator_params(nbins=4)


def _draw_spectra(axes: Axes, result: AttentionRank) -> None:
    for found, style, label in ((result.alone, '--', 'attention'), (result.convolved, '-', '+ convolution')):
        if found is None:
            continue
        index = np.arange(1, len(found.singular_values) + 1)
        relative = (found.singular_values / found.singular_values[0]).clamp(min=_FLOOR / 10).numpy()
        axes.plot(index, relative, style, color='black', linewidth=1.4, label=label)
        if len(found.effective_ranks) > 1:
            low, high = found.envelope.clamp(min=_FLOOR / 10).numpy()
            label = f'{len(found.effective_ranks)} channels'
            axes.fill_between(index, low, high, color='0.75', linewidth=0, label=label)
    axes.set_yscale('log')
    axes.set_ylim(_FLOOR, 1.5)
    axes.set_title('singular values over the largest', fontsize=FONT_SIZE)
    axes.set_xlabel('index', fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE)
    axes.locator_params(axis='x', nbins=4)
    axes.grid(color='0.9', linewidth=0.6)
    axes.legend(fontsize=FONT_SIZE, frameon=True, framealpha=0.9)
