"""The picture of objects shows those that a user would see."""

from __future__ import annotations

import mmcv
import numpy as np

from slab_det.compare.detections import Detections
from slab_det.optimization.pictures import objects_figure
from slab_det.optimization.report import SCORE


def detections(*scores: float) -> Detections:
    boxes = np.array([[4.0 * i, 2, 8, 9] for i in range(len(scores))]).reshape(-1, 4)
    return Detections(np.array(scores), np.zeros(len(scores), int), boxes)


def draw(tmp_path, before: list[Detections], after: list[Detections]) -> list[tuple[str, int]]:
    """The titles of the panels with an image, and the number of boxes in each."""
    names = [tmp_path / f'{i}.png' for i in range(len(before))]
    for name in names:
        mmcv.imwrite(np.zeros((30, 40, 3), np.uint8), str(name))
    figure = objects_figure(dict(before=dict(enumerate(before)), after=dict(enumerate(after))), names, ['cat'], SCORE)
    panels = [axes for part in figure.subfigs for axes in part.axes if axes.images]
    return [(axes.get_title(), len(axes.patches)) for axes in panels]


def test_objects_below_the_score_are_not_drawn(tmp_path):
    before, after = [detections(0.9, 0.3, 0.29), detections(0.8)], [detections(0.7, 0.1), detections(0.8, 0.2, 0.05)]
    # The images that differ most come first; what only differs in detections that are not drawn agrees.
    assert draw(tmp_path, before, after) == [('2 objects', 2), ('1 object', 1), ('1 object', 1), ('1 object', 1)]


def test_nothing_sure_is_an_empty_picture(tmp_path):
    assert draw(tmp_path, [detections(0.1)], [detections(0.2, 0.1)]) == [('0 objects', 0)] * 2
