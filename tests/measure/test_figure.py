"""The picture of AP over latency: what it joins, what it keeps apart, and whether one can read it."""

from pathlib import Path

import cv2
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from test_report import DATASET, entry, latency

from slab_det.measure.figure import ap_latency_figure, draw_ap_latency
from slab_det.measure.report import ReportEntry
from slab_det.runtime.errors import ReportError


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
    return [(text.xyann, text.xy) for text in axes.texts]


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_an_arrow_leads_from_hollow_unfused_to_filled_fused() -> None:
    figure = ap_latency_figure([*SWIN, timed('Flatten-Swin-T', 'unfused', 29)])
    box, mask = figure.findobj(Axes)
    assert (box.get_ylabel(), mask.get_ylabel()) == ('box AP', 'mask AP')
    assert arrows(box) == [((27, 42.9), (21, 42.9))] and arrows(mask) == [((27, 39.2), (21, 39.2))]
    faces = {place: to_rgba(line.get_markerfacecolor()) for place, line in markers(box).items()}
    assert faces[27, 42.9] == faces[25, 43.0] == to_rgba('white')
    assert to_rgba('white') not in (faces[21, 42.9], faces[24, 43.9])
    assert [line.get_xdata()[0] for line in box.lines if line.get_linestyle() == '--'] == [29]
    assert 'Flatten-Swin-T: AP not measured' in legend(figure) and legend(figure)[-2:] == ['unfused', 'fused']


@pytest.mark.parametrize(
    'change',
    [
        {'scope': {'threads': 1}},
        {'scope': {'deployed': True}},
        {'dataset': {**DATASET, 'images': 66}},
        {'detector': 'FasterRCNN'},
        {'training': {'iterations': 500}},
    ],
)
def test_what_was_measured_differently_gets_panels_of_its_own(change: dict) -> None:
    other = timed('Swin-T', 'fused', 34, 46.2, **change)
    panels = ap_latency_figure([SWIN[0], other]).findobj(Axes)
    places = [(axes.get_ylabel(), *markers(axes), arrows(axes)) for axes in panels]
    assert places == [('box AP', (25, 43.0), []), ('mask AP', (25, 39.3), []), ('box AP', (34, 46.2), [])]


def test_it_can_be_read(tmp_path: Path) -> None:
    draw_ap_latency(SWIN, tmp_path / 'new' / 'one.png')
    picture = cv2.imread(str(tmp_path / 'new' / 'one.png'))
    assert picture.shape[1] == 1440 and picture.std() > 10
    figure = ap_latency_figure(SWIN)
    figure.draw_without_rendering()
    assert min(text.get_fontsize() for text in texts(figure)) >= 8
    used, (width, height) = figure.get_tightbbox(figure.canvas.get_renderer()), figure.get_size_inches()
    assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height, 'something is cut off'
    # Models are told apart without colour.
    assert len({line.get_marker() for line in figure.legends[0].get_lines()[:9]}) == 9


@pytest.mark.parametrize('length', [20, 60])
def test_a_legend_of_long_names_stays_inside_and_small_differences_small(length: int) -> None:
    models = [timed(letter * length, 'unfused', 20 + i / 50, 43 + i / 50) for i, letter in enumerate('abcdef')]
    figure = ap_latency_figure(models)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    (axes,) = figure.findobj(Axes)
    for low, high in (axes.get_ylim(), axes.get_xlim()):
        assert high - low > 3.9


def test_without_ap_and_latency_of_one_model_there_is_no_picture(tmp_path: Path) -> None:
    tested = ReportEntry('Swin-S', 'unfused', 'LN', 'softmax', 'MaskRCNN', 'a.py', ap={'bbox': {'AP': 0.4}})
    with pytest.raises(ReportError, match='both AP and latency'):
        draw_ap_latency([timed('Swin-T', 'unfused', 25), tested], tmp_path / 'none.png')
    assert not (tmp_path / 'none.png').exists()
