"""Records of a measurement outlive the program, and belong to one detector, one folder of images and one machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import on_a_full_disk
from pycocotools import mask as coco_mask

from slab_det.compare.detections import Detections
from slab_det.optimization.records import ROUNDS_FILE, STATE_FILE, Records

KEY = dict(checkpoint='a', images='b')
BOXES = Detections(np.array([0.9, 0.3]), np.array([1, 0]), np.array([[1.5, 2, 3, 4], [0, 0, 1, 1]]))


def masks(count: int) -> Detections:
    pixels = np.zeros((8, 9, count), np.uint8, order='F')
    for i in range(count):
        pixels[i : i + 3, 2:5, i] = 1
    return Detections(
        np.linspace(0.9, 0.5, count), np.zeros(count, int), list(coco_mask.encode(pixels)) if count else []
    )


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Records that know two forms."""
    records = Records(tmp_path, KEY)
    records.state['forms'] = dict(eager={}, other={})
    records.save()
    return records


@pytest.mark.parametrize('found', [BOXES, BOXES.select(np.arange(0)), masks(2), masks(0)])
def test_what_was_found_is_read_again(tmp_path, records, found):
    records.add(3, dict(eager=2.0, other=1.0), dict(eager=found))
    records.add(3, dict(eager=4.0), {})
    again = Records(tmp_path, KEY)
    assert again.rounds == records.rounds and not again.damaged
    assert again.times('eager').tolist() == [2, 4] and again.times('eager', 'other').tolist() == [2]
    for read in (records.found['eager'][3], again.found['eager'][3]):
        assert read.scores.tolist() == found.scores.tolist() and read.labels.tolist() == found.labels.tolist()
        assert isinstance(read.regions, list) == isinstance(found.regions, list)
        if isinstance(found.regions, list):
            assert [coco_mask.decode(m).tolist() for m in read.regions] == [
                coco_mask.decode(m).tolist() for m in found.regions
            ]
        else:
            assert read.regions.shape == found.regions.shape and np.array_equal(read.regions, found.regions)


def test_half_a_line_is_left_out_and_the_next_round_follows(tmp_path, records):
    records.add(0, dict(eager=2.0), dict(eager=BOXES))
    with open(records.folder / ROUNDS_FILE, 'a') as stream:
        stream.write('{"image": 1, "tim')
    again = Records(tmp_path, KEY)
    assert again.count('eager') == 1 and not again.damaged
    again.add(1, dict(eager=3.0), dict(eager=BOXES))
    assert Records(tmp_path, KEY).times('eager').tolist() == [2, 3]


def test_records_of_something_else_stay_and_are_not_read(tmp_path, records):
    other = Records(tmp_path, dict(KEY, checkpoint='c'))
    assert other.folder != records.folder and other.count('eager') == 0 and not other.state['forms']
    # Of two commands at once none takes the detections of the other for its own.
    records.add(0, dict(eager=2.0), dict(eager=BOXES))
    assert Records(tmp_path, dict(KEY, checkpoint='c')).found == {}
    assert Records(tmp_path, KEY).times('eager').tolist() == [2]


@pytest.mark.parametrize(
    'name, text',
    [
        *((STATE_FILE, text) for text in ('{"epoch": 3}', '[]', '3', '{"key": {"chec', '', '\xff')),
        *(
            (ROUNDS_FILE, text)
            for text in ('{"image": 1, "tim\n', '[]\n', '{"image": 0, "times": {"eager": "x"}, "found": {}}\n')
        ),
        (ROUNDS_FILE, '{"image": 0, "times": {"unknown": 1.0}, "found": {}}\n'),
    ],
)
def test_damaged_records_are_named_and_measured_anew_beside(tmp_path, records, name, text):
    records.add(0, dict(eager=2.0), dict(eager=BOXES))
    (records.folder / name).write_text(text, encoding='latin-1')
    before = {path.name: path.read_bytes() for path in records.folder.iterdir()}
    again = Records(tmp_path, KEY)
    assert again.folder != records.folder and again.count('eager') == 0 and again.state['key'] == KEY
    assert len(again.damaged) == 1 and str(records.folder) in again.damaged[0] and name in again.damaged[0]
    assert {path.name: path.read_bytes() for path in records.folder.iterdir()} == before
    again.state['forms'] = dict(eager={})
    again.save()
    again.add(1, dict(eager=3.0), {})
    assert Records(tmp_path, KEY).times('eager').tolist() == [3]


def test_files_of_somebody_else_in_the_place_of_records_stay(tmp_path, records):
    records.folder.joinpath(STATE_FILE).unlink()
    records.folder.joinpath('mine.txt').write_text('')
    assert Records(tmp_path, KEY).damaged and records.folder.joinpath('mine.txt').is_file()


def test_a_full_disk_names_the_file_and_keeps_the_rounds_before(tmp_path, records):
    records.add(0, dict(eager=2.0), {})
    assert str(records.folder / ROUNDS_FILE) in on_a_full_disk(lambda: records.add(1, {'eager' * 2000: 1.0}, {}))
    assert Records(tmp_path, KEY).times('eager').tolist() == [2]
