"""The picture of AP over latency: what it joins, what it keeps apart, and whether one can read it."""

from itertools import combinations
from pathlib import Path

import cv2
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from slab_det.measure.figures import draw_ap_latency
from slab_det.measure.figures.ap_latency import ap_latency_figure
from slab_det.measure.figures.labels import wrap
from slab_det.measure.figures.series import parse_name, style_of
from slab_det.measure.paper import SLAB_TABLE_3
from slab_det.measure.reporting import ReportEntry
from slab_det.runtime.errors import ReportError

COCO = {'ann_file': '/data/coco/annotations/instances_val2017.json', 'images': 5000}
SUBSET = {**COCO, 'images': 66}
LATENCY = {
    'scope': 'detector',
    'size': [800, 1333],
    'dtype': 'float32',
    'device': 'Some CPU',
    'device_type': 'cpu',
    'threads': 2,
    'compiled': False,
    'rounds': 100,
    'warmup': 20,
}


def entry(
    name: str,
    variant: str,
    ms: float,
    box: float | None = None,
    mask: float | None = None,
    scope: dict | None = None,
    **changes: object,
) -> ReportEntry:
    ap = {kind: {'AP': value / 100} for kind, value in (('bbox', box), ('segm', mask)) if value is not None}
    values = {'norm': 'any', 'attention': 'any', 'detector': 'MaskRCNN', 'dataset': COCO, 'ap': ap or None, **changes}
    # The path keeps entries of one name apart, as it does in a report.
    return ReportEntry(
        name, variant, config=f'{name}-{ms}.py', latency={**LATENCY, **(scope or {}), 'median_ms': ms}, **values
    )


SWIN = [
    entry('Swin-T', 'unfused', 25, 43.0, 39.3),
    entry('Swin-S', 'unfused', 34, 46.2, 41.7),
    entry('Swin-T-PRepBN', 'unfused', 27, 42.9, 39.2),
    entry('Swin-T-PRepBN', 'fused', 21, 42.9, 39.2),
    entry('Swin-S-PRepBN', 'unfused', 37, 45.9, 41.4),
    entry('Swin-S-PRepBN', 'fused', 30, 45.8, 41.4),
    entry('SLAB-Swin-T', 'fused', 24, 43.9, 40.1),
    entry('PVT-T', 'unfused', 22, 36.6, 34.9),
    entry('PVT-S', 'unfused', 31, 40.5, 37.9),
]


def lines(axes: Axes) -> list[list[tuple[float, float]]]:
    """What each line joins; markers alone are drawn as lines of one point."""
    found = [line.get_xydata().round(6).tolist() for line in axes.lines if line.get_linestyle() != 'None']
    return [[tuple(point) for point in points] for points in found if len(points) > 1]


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def test_a_line_joins_the_sizes_of_one_norm_and_attention_and_nothing_else() -> None:
    box, mask = ap_latency_figure(SWIN).findobj(Axes)
    assert sorted(lines(box)) == [
        [(21, 42.9), (30, 45.8)],  # PRepBN, as served: fused
        [(22, 36.6), (31, 40.5)],  # PVT is not Swin
        [(25, 43.0), (34, 46.2)],
    ]
    assert sorted(lines(mask))[0] == [(21, 39.2), (30, 41.4)]
    assert (box.get_ylabel(), mask.get_ylabel()) == ('box AP', 'mask AP')
    # Hollow is unfused.
    faces = {
        (*map(float, (line.get_xdata()[0], line.get_ydata()[0])),): to_rgba(line.get_markerfacecolor())
        for line in box.lines
        if line.get_linestyle() == 'None'
    }
    assert faces[27, 42.9] == faces[25, 43.0] == to_rgba('white') != faces[21, 42.9] == faces[30, 45.8]


@pytest.mark.parametrize(
    'change',
    [
        {'scope': {'threads': 1}},
        {'scope': {'dtype': 'float16'}},
        {'scope': {'scope': 'backbone'}},
        {'dataset': SUBSET},
        {'detector': 'FasterRCNN'},
        {'training': {'iterations': 500}},
    ],
)
def test_what_was_measured_differently_gets_panels_of_its_own(change: dict) -> None:
    panels = ap_latency_figure([SWIN[0], entry('Swin-S', 'unfused', 34, 46.2, **change)]).findobj(Axes)
    assert [(axes.get_ylabel(), lines(axes)) for axes in panels] == [('box AP', []), ('mask AP', []), ('box AP', [])]


def test_forms_of_one_model_are_compared_in_one_panel() -> None:
    """Deployed or compiled is how a model is run: that may be compared, and the marker says it."""
    figure = ap_latency_figure(
        [
            entry('Swin-T-PRepBN', 'unfused', 27, 43),
            entry('Swin-T-PRepBN', 'fused', 21, 43),
            entry('Swin-T-PRepBN', 'fused', 9, 43, scope={'deployed': True, 'compiled': True}),
            entry('Swin-S-PRepBN', 'fused', 30, 46),
        ]
    )
    (axes,) = figure.findobj(Axes)
    assert lines(axes) == [[(9, 43), (30, 46)]]
    edges = {line.get_xdata()[0]: line.get_markeredgecolor() for line in axes.lines if line.get_linestyle() == 'None'}
    assert edges[9] == 'black' != edges[21] == edges[27]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[1:] == ['unfused', 'fused', 'fused, deployed, torch.compile']
    # Its scope is what all points share.
    assert not any('deployed' in text.get_text() for text in texts(figure) if text not in figure.legends[0].get_texts())


def test_seeds_of_one_model_are_one_point_and_are_named() -> None:
    runs = [
        entry('Swin-T', 'unfused', ms, ap, training={'seed': seed, 'iterations': 9})
        for seed, (ms, ap) in enumerate([(24, 43.0), (25, 43.3), (26, 43.9)])
    ]
    figure = ap_latency_figure([*runs, entry('Swin-S', 'unfused', 34, 46, training={'seed': 0, 'iterations': 9})])
    (axes,) = figure.findobj(Axes)
    assert lines(axes) == [[(25, 43.4), (34, 46)]]
    assert any('seeds 0, 1, 2' in text.get_text() for text in texts(figure))


def test_published_points_stand_in_grey_over_their_own_latency() -> None:
    figure = ap_latency_figure(SWIN, paper=True)
    box, paper_box, mask, paper_mask = figure.findobj(Axes)
    # Rows of Table 3 that have a second size, box AP.
    assert sorted(lines(paper_box)) == [
        [(43.0, 42.9), (57.3, 45.9)],
        [(43.2, 36.5), (59.6, 40.6)],
        [(46.0, 36.6), (64.0, 40.5)],
        [(51.0, 43.1), (63.1, 46.2)],
    ]
    drawn = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in paper_mask.lines}
    assert drawn == {(row.ms, row.mask[0]) for row in SLAB_TABLE_3.rows.values()}
    for line in (*paper_box.lines, *paper_mask.lines):
        red, green, blue, _ = to_rgba(line.get_color() if len(line.get_xdata()) > 1 else line.get_markerfacecolor())
        assert red == green == blue
    assert 'V100' in paper_mask.get_xlabel() and 'V100' not in mask.get_xlabel()
    assert 'not measured here' in paper_box.get_title()
    # Ours is COCO val2017 too: one AP axis, side by side; the latencies share nothing.
    assert box.get_ylim() == paper_box.get_ylim() and mask.get_ylim() == paper_mask.get_ylim()
    assert box.get_position().bounds[1::2] == pytest.approx(paper_box.get_position().bounds[1::2], abs=1e-3)
    assert mask.get_xlim() != paper_mask.get_xlim()
    assert 'grey: paper, V100' in [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_ap_axis_is_shared_with_coco_alone() -> None:
    box, paper_box, *_ = ap_latency_figure([entry('Swin-T', 'unfused', 25, 80, 70, dataset=SUBSET)], True).findobj(Axes)
    assert box.get_ylim()[0] > 70 and paper_box.get_ylim()[1] < 60


def test_a_detector_that_no_paper_timed_stands_alone() -> None:
    figure = ap_latency_figure([entry('Swin-T', 'unfused', 25, 43, detector='FasterRCNN')], paper=True)
    assert len(figure.findobj(Axes)) == 1


@pytest.mark.parametrize('paper', [False, True])
def test_it_can_be_read(paper: bool) -> None:
    figure = ap_latency_figure([*SWIN, entry('Flatten-Swin-T', 'unfused', 29)], paper)
    renderer = figure.canvas.get_renderer()
    assert min(text.get_fontsize() for text in texts(figure)) >= 8
    used, (width, height) = figure.get_tightbbox(renderer), figure.get_size_inches()
    assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height, 'something is cut off'
    for axes in figure.findobj(Axes):
        labels = [label for label in axes.texts if label.get_text()]
        boxes = [label.get_window_extent(renderer) for label in labels]
        assert len(boxes) >= 7
        frame = axes.get_window_extent(renderer)
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
        assert all(frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
        for first, second in combinations(boxes, 2):
            assert not first.overlaps(second)
        markers = [
            axes.transData.transform((line.get_xdata()[0], line.get_ydata()[0]))
            for line in axes.lines
            if line.get_linestyle() == 'None'
        ]
        for box, label in zip(boxes, labels, strict=True):
            assert not any(box.contains(*marker) for marker in markers), label
    assert any('Flatten-Swin-T unfused' in text.get_text() for text in texts(figure))


@pytest.mark.parametrize('length', [20, 26, 36, 44, 60])
def test_a_legend_of_long_names_stays_inside(length: int) -> None:
    entries = [entry(f'{letter * length}', 'unfused', 20 + 5 * i, 40 + i) for i, letter in enumerate('abcdef')]
    figure = ap_latency_figure(entries)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_styles_differ_without_colour() -> None:
    names = [f'series {i}' for i in range(40)]
    styles = {style_of(name, names)[1:] for name in names}
    assert len(styles) == 40
    # Points have no dashes.
    assert len({style_of(name, names)[:2] for name in names}) == 40
    # In a picture of up to five series even dashes alone tell them apart.
    assert len({style_of(name, names).dashes for name in names[:5]}) == 5


@pytest.mark.parametrize(
    ('label', 'series', 'size', 'title'),
    [
        ('Swin-T', 'Swin', 'T', 'Swin (LN, softmax)'),
        ('Swin-S-PRepBN', 'Swin-PRepBN', 'S', 'Swin-PRepBN (softmax)'),
        ('SLAB-Swin-32x2222', 'SLAB-Swin', '32x2222', 'SLAB-Swin (PRepBN, SLA)'),
        ('SLA-Swin-T-UN', 'SLA-Swin-UN', 'T', 'SLA-Swin-UN (SLA)'),
        ('Flatten-Swin-T', 'Flatten-Swin', 'T', 'Flatten-Swin (LN, focused)'),
        ('Swin-T-BN+FFNBN', 'Swin-BN+FFNBN', 'T', 'Swin-BN+FFNBN (softmax)'),
        ('PVTv2-B2', 'PVTv2', 'B2', 'PVTv2 (LN, softmax)'),
        ('ResNet', 'ResNet', 'ResNet', 'ResNet'),
    ],
)
def test_row_labels_are_taken_apart(label: str, series: str, size: str, title: str) -> None:
    assert parse_name(label) == (label, series, size, title)


def test_wrapped_lines_have_about_one_length() -> None:
    found = wrap('one two three four five six seven eight nine ten', 40).split('\n')
    assert found == ['one two three four five', 'six seven eight nine ten'] and wrap('short', 40) == 'short'


def test_small_differences_are_not_blown_up() -> None:
    rows = [entry('Swin-T', 'unfused', 20, 43.0), entry('Swin-S', 'unfused', 20.1, 43.1)]
    (box,) = ap_latency_figure(rows).findobj(Axes)
    low, high = box.get_ylim()
    assert high - low > 3.9
    left, right = box.get_xlim()
    assert right - left > 3.9


def test_it_is_written_as_png(tmp_path: Path) -> None:
    draw_ap_latency(SWIN[:2], tmp_path / 'new' / 'one.png')
    picture = cv2.imread(str(tmp_path / 'new' / 'one.png'))
    # Seven inches wide, fit for print.
    assert picture.shape[1] == 1440 and picture.std() > 10


def test_without_ap_and_latency_of_one_model_there_is_no_picture(tmp_path: Path) -> None:
    timed = entry('Swin-T', 'unfused', 25)
    tested = ReportEntry('Swin-S', 'unfused', 'LN', 'softmax', 'MaskRCNN', 'a.py', ap={'bbox': {'AP': 0.4}})
    with pytest.raises(ReportError, match='both AP and latency'):
        draw_ap_latency([timed, tested], tmp_path / 'none.png')
    assert not (tmp_path / 'none.png').exists()
