"""The picture of AP over latency: what it joins, what it keeps apart, and whether one can read it."""

from pathlib import Path

import cv2
import pytest
from conftest import CONFIGS
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from slab_det.measure.figure import ap_latency_figure, draw_ap_latency
from slab_det.measure.report import ReportEntry, read_paper_tables
from slab_det.runtime.errors import ReportError

PAPER_TABLES = read_paper_tables(CONFIGS.parent / 'benchmarks' / 'paper_tables.json')
COCO = {'ann_file': '/data/coco/annotations/instances_val2017.json', 'images': 5000}
SUBSET = {**COCO, 'images': 66}
LATENCY = {
    'scope': 'detector',
    'size': [800, 1333],
    'dtype': 'float32',
    'device': 'Some CPU',
    'device_type': 'cpu',
    'threads': 2,
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


@pytest.fixture(scope='module')
def figure() -> Figure:
    """All kinds of points at once."""
    return ap_latency_figure([*SWIN, entry('Flatten-Swin-T', 'unfused', 29)], PAPER_TABLES)


def lines(axes: Axes) -> list[list[tuple[float, float]]]:
    """The points that each dotted line joins; such a line of one point is not seen."""
    found = [line.get_xydata().round(6).tolist() for line in axes.lines if line.get_linestyle() == ':']
    return sorted([tuple(point) for point in points] for points in found if len(points) > 1)


def markers(axes: Axes) -> dict[tuple[float, float], Line2D]:
    found = [line for line in axes.lines if line.get_linestyle() == 'None' and len(line.get_xdata()) == 1]
    return {(float(line.get_xdata()[0]), float(line.get_ydata()[0])): line for line in found}


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_line_joins_the_sizes_of_one_norm_and_attention_and_nothing_else(figure: Figure) -> None:
    box, mask = figure.findobj(Axes)[:2]
    assert lines(box) == [
        [(21, 42.9), (30, 45.8)],  # PRepBN, as served: fused
        [(22, 36.6), (31, 40.5)],  # PVT is not Swin
        [(25, 43.0), (34, 46.2)],
    ]
    assert lines(mask)[0] == [(21, 39.2), (30, 41.4)]
    assert (box.get_ylabel(), mask.get_ylabel()) == ('box AP', 'mask AP')
    # Hollow is unfused.
    faces = {place: to_rgba(line.get_markerfacecolor()) for place, line in markers(box).items()}
    assert faces[27, 42.9] == faces[25, 43.0] == to_rgba('white')
    assert to_rgba('white') not in (faces[21, 42.9], faces[24, 43.9])


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
    figure = ap_latency_figure(
        [
            entry('Swin-T-PRepBN', 'unfused', 27, 43),
            entry('Swin-T-PRepBN', 'fused', 21, 43),
            entry('Swin-T-PRepBN', 'fused', 9, 43, scope={'deployed': True, 'compile_mode': 'default'}),
            entry('Swin-S-PRepBN', 'fused', 30, 46),
        ]
    )
    (axes,) = figure.findobj(Axes)
    assert lines(axes) == [[(9, 43), (30, 46)]]
    edges = {place[0]: line.get_markeredgecolor() for place, line in markers(axes).items()}
    assert edges[9] == 'black' != edges[21] == edges[27]
    forms = ['unfused', 'fused', 'fused, deployed, torch.compile']
    assert legend(figure) == ['Swin-T-PRepBN', 'Swin-S-PRepBN', *forms]
    # The scope is what all points share.
    assert not any('deployed' in text.get_text() for text in texts(figure) if text.get_text() not in forms)


def test_seeds_of_one_model_are_one_point_and_are_named() -> None:
    runs = [
        entry('Swin-T', 'unfused', ms, ap, training={'seed': seed, 'iterations': 9})
        for seed, (ms, ap) in enumerate([(24, 43.0), (25, 43.3), (26, 43.9)])
    ]
    figure = ap_latency_figure([*runs, entry('Swin-S', 'unfused', 34, 46, training={'seed': 0, 'iterations': 9})])
    (axes,) = figure.findobj(Axes)
    assert lines(axes) == [[(25, 43.4), (34, 46)]]
    assert any('seeds 0, 1, 2' in text.get_text() for text in texts(figure))


def test_published_points_stand_in_grey_over_their_own_latency(figure: Figure) -> None:
    _, mask, paper_box, paper_mask = figure.findobj(Axes)
    # Rows of Table 3 that have a second size, box AP.
    assert lines(paper_box) == [
        [(43.0, 42.9), (57.3, 45.9)],
        [(43.2, 36.5), (59.6, 40.6)],
        [(46.0, 36.6), (64.0, 40.5)],
        [(51.0, 43.1), (63.1, 46.2)],
    ]
    assert set(markers(paper_mask)) == {(row['ms'], row['mask'][0]) for row in PAPER_TABLES[0].rows.values()}
    for line in markers(paper_box).values():
        red, green, blue, _ = to_rgba(line.get_markerfacecolor())
        assert red == green == blue
    said = [text.get_text() for text in texts(figure)]
    assert any('not measured here' in text for text in said) and any('V100' in text for text in said)
    assert mask.get_xlim() != paper_mask.get_xlim()
    # UN's tables have no latency, and none is of this detector.
    other = ap_latency_figure([entry('Swin-T', 'unfused', 25, 43, detector='FasterRCNN')], PAPER_TABLES)
    assert len(other.findobj(Axes)) == 1


def test_it_can_be_read(figure: Figure, tmp_path: Path) -> None:
    draw_ap_latency(SWIN[:1], tmp_path / 'new' / 'one.png')
    picture = cv2.imread(str(tmp_path / 'new' / 'one.png'))
    assert picture.shape[1] == 1440 and picture.std() > 10
    figure.draw_without_rendering()
    assert min(text.get_fontsize() for text in texts(figure)) >= 8
    used, (width, height) = figure.get_tightbbox(figure.canvas.get_renderer()), figure.get_size_inches()
    assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height, 'something is cut off'
    assert 'Flatten-Swin-T: AP not measured' not in legend(figure), 'the paper has its AP'
    assert 'Flatten-Swin-T: AP not measured' in legend(ap_latency_figure([SWIN[0], entry('Flatten-Swin-T', '', 29)]))
    # Models are told apart without colour.
    looks = {(line.get_marker(), line.get_color()) for line in figure.legends[0].get_lines()}
    assert len({line.get_marker() for line in figure.legends[0].get_lines()[:8]}) == 8 and len(looks) >= 10


@pytest.mark.parametrize('length', [20, 60])
def test_a_legend_of_long_names_stays_inside_and_small_differences_small(length: int) -> None:
    models = [entry(letter * length, 'unfused', 20 + i / 50, 43 + i / 50) for i, letter in enumerate('abcdef')]
    figure = ap_latency_figure(models)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    (axes,) = figure.findobj(Axes)
    for low, high in (axes.get_ylim(), axes.get_xlim()):
        assert high - low > 3.9


def test_without_ap_and_latency_of_one_model_there_is_no_picture(tmp_path: Path) -> None:
    timed = entry('Swin-T', 'unfused', 25)
    tested = ReportEntry('Swin-S', 'unfused', 'LN', 'softmax', 'MaskRCNN', 'a.py', ap={'bbox': {'AP': 0.4}})
    with pytest.raises(ReportError, match='both AP and latency'):
        draw_ap_latency([timed, tested], tmp_path / 'none.png')
    assert not (tmp_path / 'none.png').exists()
