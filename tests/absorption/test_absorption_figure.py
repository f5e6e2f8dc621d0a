"""The picture of an absorption: what its bars and points say, and whether one can read it."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text

from slab_det.absorption import AbsorptionReport, NormAbsorption
from slab_det.absorption.figure import absorption_figure
from slab_det.measure.figure import save_figure

REPORT = AbsorptionReport(
    [
        NormAbsorption('backbone.patch_embed.norm', 'kept', reason='not affine', diagonal=0.3, left=0.08),
        NormAbsorption('backbone.stages.0.blocks.0.norm1', 'absorbed', diagonal=0.1, left=0.02),
        NormAbsorption('backbone.norm3', 'absorbed', diagonal=0.004, left=0.0),
        NormAbsorption('neck.norm', 'kept', reason='it is not in the backbone'),
    ]
)


def test_each_norm_has_a_bar_for_the_diagonal_and_one_for_the_fitted_map() -> None:
    (axes,) = absorption_figure(REPORT, {}, {}).findobj(Axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        'kept: patch_embed.norm',
        'stages.0.blocks.0.norm1',
        'norm3',
        'kept: neck.norm',
    ]
    diagonal, fitted = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert diagonal == [0.3, 0.1, 0.004]
    assert fitted == [0.08, 0.02, pytest.approx(1e-4)], 'nothing left still has a bar on a logarithmic axis'
    assert axes.get_xscale() == 'log' and axes.get_xlim()[0] < 1e-4
    assert axes.yaxis_inverted(), 'the first norm is on top'
    colours = {label.get_color() for label in axes.get_yticklabels()}
    assert len(colours) == 2, 'what was kept is marked'


def test_curves_stand_side_by_side_and_the_teacher_is_hollow() -> None:
    _, agreement, latency = absorption_figure(REPORT, {0: 0.8, 2: 0.9, 4: 1.0}, {0: 30.0, 4: 33.0}).findobj(Axes)
    for axes, points in ((agreement, [(0, 0.8), (2, 0.9), (4, 1.0)]), (latency, [(0, 30.0), (4, 33.0)])):
        markers = [line for line in axes.lines if line.get_marker() == 'o']
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in markers] == points
        assert [line.get_markerfacecolor() == 'white' for line in markers] == [x == 4 for x, _ in points]
    assert 'agreement' in agreement.get_ylabel() and '(ms)' in latency.get_ylabel()
    assert agreement.get_ylim()[1] == 1, 'agreement is an AP'


@pytest.mark.parametrize('depth', [1, 15])
def test_it_can_be_read(depth: int, tmp_path: Path) -> None:
    report = AbsorptionReport(REPORT.norms * depth)
    figure = absorption_figure(report, {0: 0.8, 2: 0.9}, {})
    save_figure(figure, tmp_path / 'one.svg')
    picture = (tmp_path / 'one.svg').read_text()
    assert len(picture) < 100_000 and '>stages.0.blocks.0.norm1<' in picture
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) >= 8
    used, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height, 'something is cut off'
    labels = figure.findobj(Axes)[0].get_yticklabels()
    boxes = [label.get_window_extent() for label in labels]
    assert all(upper.y0 >= lower.y1 for upper, lower in zip(boxes, boxes[1:], strict=False)), 'names overlap'
