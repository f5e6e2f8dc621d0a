"""Records of a measurement outlive the program, and belong to one detector, one folder of images and one machine."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import on_a_full_disk
from pycocotools import mask as coco_mask

from slab_det.compare.agreement import Detections
from slab_det.optimization.records import ROUNDS, Records

KEY = dict(checkpoint='a', images='b')
BOXES = Detections(np.array([0.9, 0.3]), np.array([1, 0]), np.array([[1.5, 2, 3, 4], [0, 0, 1, 1]]))


def masks(count: int) -> Detections:
    pixels = np.zeros((8, 9, count), np.uint8, order='F')
    for i in range(count):
        pixels[i : i + 3, 2:5, i] = 1
    return Detections(
        np.linspace(0.9, 0.5, count), np.zeros(count, int), list(coco_mask.encode(pixels)) if count else []
    )


@pytest.mark.parametrize('found', [BOXES, BOXES.select(np.arange(0)), masks(2), masks(0)])
def test_what_was_found_is_read_again(tmp_path, found):
    records = Records(tmp_path, KEY)
    records.add(3, dict(eager=2.0, other=1.0), dict(eager=found))
    records.add(3, dict(eager=4.0), {})
    again = Records(tmp_path, KEY)
    assert again.rounds == records.rounds and not again.dropped
    assert again.times('eager').tolist() == [2, 4] and again.ratios('other', 'eager').tolist() == [0.5]
    for read in (records.found['eager'][3], again.found['eager'][3]):
        assert read.scores.tolist() == found.scores.tolist() and read.labels.tolist() == found.labels.tolist()
        assert isinstance(read.regions, list) == isinstance(found.regions, list)
        if isinstance(found.regions, list):
            assert [coco_mask.decode(m).tolist() for m in read.regions] == [
                coco_mask.decode(m).tolist() for m in found.regions
            ]
        else:
            assert read.regions.shape == found.regions.shape and np.array_equal(read.regions, found.regions)


def test_half_a_line_is_left_out_and_the_next_round_follows(tmp_path):
    Records(tmp_path, KEY).add(0, dict(eager=2.0), dict(eager=BOXES))
    with open(tmp_path / ROUNDS, 'a') as stream:
        stream.write('{"image": 1, "tim')
    records = Records(tmp_path, KEY)
    assert records.count('eager') == 1
    records.add(1, dict(eager=3.0), dict(eager=BOXES))
    assert Records(tmp_path, KEY).times('eager').tolist() == [2, 3]


def test_records_of_something_else_are_dropped_and_named(tmp_path):
    records = Records(tmp_path, KEY)
    records.state['forms'] = dict(eager={})
    records.save()
    records.add(0, dict(eager=2.0), {})
    (tmp_path / 'blocks').mkdir()
    (tmp_path / 'blocks' / 'x.pth').write_text('')
    again = Records(tmp_path, dict(KEY, checkpoint='c'))
    assert again.dropped == 'checkpoint' and again.count('eager') == 0 and 'forms' not in again.state
    assert [path.name for path in tmp_path.iterdir()] == ['state.json']
    assert json.loads((tmp_path / 'state.json').read_text())['key']['checkpoint'] == 'c'


def test_a_full_disk_names_the_file_and_keeps_the_rounds_before(tmp_path):
    records = Records(tmp_path, KEY)
    records.add(0, dict(eager=2.0), {})
    assert str(tmp_path / ROUNDS) in on_a_full_disk(lambda: records.add(1, {'eager' * 2000: 1.0}, {}))
    assert Records(tmp_path, KEY).times('eager').tolist() == [2]
