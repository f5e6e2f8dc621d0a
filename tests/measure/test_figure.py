"""The picture of AP over latency: panels hold comparable models, and every name is readable."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.text import Text
from test_report_file import DATASET, entry, latency

from slab_det.common.errors import SlabDetError
from slab_det.measure.figure import ap_latency_figure, save_figure
from slab_det.measure.report_file import ReportEntry


def timed(name: str, variant: str, ms: float, *ap: float, scope: dict | None = None, **changes: object) -> ReportEntry:
    """An entry with latency, and with box AP, box and mask AP, or no AP."""
    found = {kind: {'AP': value / 100} for kind, value in zip(('bbox', 'segm'), ap, strict=False)}
    values = {'dataset': DATASET, 'ap': found or None, 'config': f'{name}-{ms}.py', **changes}
    return entry(name, variant, latency=latency(ms, **(scope or {})), **values)


SWIN = [
    timed('Swin-T', 'unfused', 25, 43.0, 39.3),
    timed('Swin-T-PRepBN', 'fused', 21, 42.9, 39.2),
    timed('Swin-T-PRepBN', 'unfused', 27, 42.9, 39.2),
    timed('SLAB-Swin-T', 'fused', 24, 43.9, 40.1),
    *(timed(f'{letter}-Swin', 'unfused', 30 + i, 41 + i, 38) for i, letter in enumerate('abcdef')),
]


def markers(axes: Axes) -> dict[tuple[float, float], Line2D]:
    found = [line for line in axes.lines if line.get_linestyle() == 'None']
    return {(float(line.get_xdata()[0]), float(line.get_ydata()[0])): line for line in found}


def arrows(axes: Axes) -> list[tuple]:
    return [(text.xyann, text.xy) for text in axes.texts if not text.get_text() and text.anncoords == 'data']


def names(part: FigureBase) -> list[str]:
    return [text.get_text().replace('\n', '') for legend in part.legends for text in legend.get_texts()]


def test_an_arrow_leads_from_hollow_unfused_to_filled_fused() -> None:
    figure = ap_latency_figure([*SWIN, timed('Flatten-Swin-T', 'unfused', 29)])
    box, mask = figure.findobj(Axes)
    assert (box.get_ylabel(), mask.get_ylabel()) == ('box AP', 'mask AP')
    assert arrows(box) == [((27, 42.9), (21, 42.9))] and arrows(mask) == [((27, 39.2), (21, 39.2))]
    faces = {point: to_rgba(line.get_markerfacecolor()) for point, line in markers(box).items()}
    assert faces[27, 42.9] == faces[25, 43.0] == to_rgba('white')
    assert to_rgba('white') not in (faces[21, 42.9], faces[24, 43.9])
    labels = dict.fromkeys(entry.name for entry in SWIN)
    assert names(figure.subfigs[0]) == [*labels], 'a model without AP is left out'
    shown = {(line.get_marker(), line.get_color()) for line in markers(box).values()}
    assert len(shown) == len(labels), 'one look for each name'


@pytest.mark.parametrize(
    'change',
    [
        {'scope': {'threads': 1}},
        {'dataset': {**DATASET, 'images': 66}},
        {'detector': 'FasterRCNN'},
        {'training': {'iterations': 500}},
    ],
)
def test_incomparable_entries_get_separate_panels(change: dict) -> None:
    other = timed('Swin-T', 'fused', 34, 46.2, **change)
    panels = ap_latency_figure([SWIN[0], other]).findobj(Axes)
    panels_hold = [(axes.get_ylabel(), *markers(axes), arrows(axes)) for axes in panels]
    assert panels_hold == [('box AP', (25, 43.0), []), ('mask AP', (25, 39.3), []), ('box AP', (34, 46.2), [])]


def test_svg_is_reproducible_and_keeps_text(tmp_path: Path) -> None:
    for name in ('new/one.svg', 'again.svg'):
        save_figure(ap_latency_figure(SWIN), tmp_path / name)
    picture = (tmp_path / 'new' / 'one.svg').read_text()
    assert len(picture) < 100_000 and '>SLAB-Swin-T<' in picture and (tmp_path / 'again.svg').read_text() == picture


def test_legend_does_not_overlap_or_shrink_the_panels() -> None:
    models = [timed(letter * 40, 'unfused', 20 + i / 50, 43 + i / 50, 39) for i, letter in enumerate('abcdefgh')]
    figure = ap_latency_figure(models)
    figure.draw_without_rendering()
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text().strip()) >= 8
    used, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height, 'something is cut off'
    (legend,) = figure.subfigs[0].legends
    box = legend.get_window_extent()
    for axes in figure.findobj(Axes):
        assert not box.overlaps(axes.get_tightbbox()) and axes.get_window_extent().height > 200, 'one inch at least'


def test_figure_needs_an_entry_with_ap_and_latency() -> None:
    tested = ReportEntry('Swin-S', 'unfused', 'LN', 'softmax', 'MaskRCNN', 'a.py', ap={'bbox': {'AP': 0.4}})
    with pytest.raises(SlabDetError, match='both AP and latency'):
        ap_latency_figure([timed('Swin-T', 'unfused', 25), tested])
