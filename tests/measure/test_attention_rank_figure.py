"""The picture of attention maps and spectra: what stands where, and whether one can read it."""

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.text import Text

from slab_det.measure.attention_rank import AttentionRank, MapRank
from slab_det.measure.figures.attention_rank import attention_rank_figure

SIZE = 12


def map_rank(channels: int, scale: float) -> MapRank:
    matrix = torch.full((SIZE, SIZE), scale, dtype=torch.double)
    values = torch.logspace(0, -3, SIZE, dtype=torch.double)
    return MapRank(matrix, values, torch.stack([values / 2, values * 2]), (5.25,) * channels, (9,) * channels)


def result(kind: str, convolved: bool) -> AttentionRank:
    return AttentionRank(kind, 1, 0, 2, 3, (3, 4), 2, 4, map_rank(1, 0.1), map_rank(3, -0.5) if convolved else None)


@pytest.fixture(scope='module')
def figure():
    figure = attention_rank_figure(
        {
            'Swin-T, weights of a.pth': result('softmax', False),
            'SLAB-Swin-T, RANDOM WEIGHTS (seed 0)': result('sla', True),
        },
        'photo.jpg at 800x1333 (HxW)',
    )
    figure.draw_without_rendering()
    return figure


def test_each_row_names_weights_place_and_ranks(figure) -> None:
    texts = '\n'.join(text.get_text() for text in figure.findobj(Text))
    for expected in (
        'photo.jpg at 800x1333',
        'SLAB-Swin-T, RANDOM WEIGHTS (seed 0)',
        'Swin-T, weights of a.pth',
        'stage 1, block 0, head 2, 3x4 tokens of window 3 (2 of padding), d = 4',
        'sla + depthwise conv.\neffective rank 5.2 of 12\nnumerical rank 9',
        'no convolution',
    ):
        assert expected in texts, expected


def test_maps_show_sizes_of_weights_on_one_scale(figure) -> None:
    images = [axes.images[0] for axes in figure.findobj(Axes) if axes.images]
    assert [float(np.unique(image.get_array())[0]) for image in images] == [0.1, 0.1, 0.5]
    assert len({image.norm for image in images}) == 1 and {image.cmap.name for image in images} == {'gray_r'}


def test_spectra_are_told_apart_without_colour(figure) -> None:
    spectra = [axes for axes in figure.findobj(Axes) if axes.get_yscale() == 'log' and axes.lines]
    assert [[line.get_linestyle() for line in axes.lines] for axes in spectra] == [['--'], ['--', '-']]
    np.testing.assert_allclose(spectra[1].lines[1].get_ydata(), np.logspace(0, -3, SIZE))
    assert [len(axes.collections) for axes in spectra] == [0, 1]


def test_it_can_be_read(figure) -> None:
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    # The exponents of a logarithmic axis are set smaller by the typesetting, not by the font size.
    assert min(text.get_fontsize() for text in texts) >= 8
    used, (width, height) = figure.get_tightbbox(figure.canvas.get_renderer()), figure.get_size_inches()
    assert used.x0 >= 0 and used.y0 >= 0 and used.x1 <= width and used.y1 <= height, 'something is cut off'
