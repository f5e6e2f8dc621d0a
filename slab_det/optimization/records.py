"""Records of a measurement: the times and detections of each round, in a file that an interrupted run goes on with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from slab_det.common.files import whole_file
from slab_det.compare.detections import Detections

STATE_FILE, ROUNDS_FILE = 'state.json', 'rounds.jsonl'
# Stands for the original detector on mirrored images among the keys of forms that found something.
TRUTH = 'mirrored'


class Records:
    """What was measured so far of one detector, on some images and one machine, in a folder inside ``parent``.

    Its name is a digest of ``key``, so that what was measured of something else stays where it is, and another command
    cannot append to it. Of a folder whose files are damaged nothing is read or written: the next one begins anew.

    Attributes:
        folder: The folder.
        state: Values that JSON can hold, saved by :meth:`save`.
        rounds: The milliseconds of each form, by its key, on one image: one dict per round, and an empty one where
            forms predicted the image without being timed.
        found: The detections of each form, by its key, in each image, by its index; of ``TRUTH`` too.
        failed: Why a form does not run, by its key; not in the files, because the next call tries again.
        damaged: What is wrong with earlier records of the same key.

    Args:
        parent: The folder ``work`` of an optimization; it need not exist.
        key: What the records depend on, by name: values that JSON can hold.
    """

    def __init__(self, parent: Path, key: Mapping[str, Any]) -> None:
        text = json.dumps(key, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.failed: dict[str, str] = {}
        self.damaged: list[str] = []
        for number in count(1):
            self.folder = parent / (digest if number == 1 else f'{digest}-{number}')
            self.rounds: list[dict[str, float]] = []
            self.found: dict[str, dict[int, Detections]] = {}
            self.state: dict = dict(key=json.loads(text), forms={}, ap={})
            try:
                self._read()
            except ValueError as error:
                self.damaged.append(f'{self.folder} is damaged: {error}')
            else:
                break
        self.save()

    @property
    def infos(self) -> dict[str, dict]:
        """What each form is, its first call in seconds, memory and size on disk, by its key."""
        return self.state['forms']

    def save(self) -> None:
        """Writes ``state``."""
        with whole_file(self.folder / STATE_FILE) as name:
            name.write_text(json.dumps(self.state, indent=1))

    def add(self, image: int, times: Mapping[str, float], found: Mapping[str, Detections]) -> None:
        """Adds a round, or the predictions of an image that were not timed, to the file too.

        Args:
            image: Index of the image.
            times: Milliseconds of each form that was timed, by its key.
            found: Detections of the forms that had not seen the image before.
        """
        line = dict(image=image, times=dict(times), found={key: _to_json(value) for key, value in found.items()})
        path = self.folder / ROUNDS_FILE
        try:
            with open(path, 'a') as stream:
                stream.write(json.dumps(line) + '\n')
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            # The error for a full disk has no file name.
            error.filename = str(path)
            raise
        self._keep(line)

    def count(self, key: str) -> int:
        """The number of rounds of a form."""
        return sum(key in times for times in self.rounds)

    def times(self, key: str, other: str | None = None) -> np.ndarray:
        """The milliseconds of a form in each of its rounds, or of those that ``other`` took part in."""
        return np.array([times[key] for times in self.rounds if {key, other or key} <= times.keys()])

    def found_by(self, *keys: str) -> list[list[Detections]]:
        """The detections of each of several forms, in the images that all of them have seen."""
        found = [self.found.get(key, {}) for key in keys]
        images = sorted(set.intersection(*(set(each) for each in found)))
        return [[each[i] for i in images] for each in found]

    def _read(self) -> None:
        """Reads the files of the folder, if there are any; what is not as it was written raises some error."""
        files = [path for path in self.folder.glob('*') if path.suffix != '.tmp']
        if not files:
            return
        try:
            state = json.loads((self.folder / STATE_FILE).read_text()) if self.folder / STATE_FILE in files else {}
            is_own = state.keys() == self.state.keys() and state['key'] == self.state['key']
            is_own = is_own and all(isinstance(value, dict) for value in state.values())
        except (ValueError, AttributeError):
            is_own = False
        if not is_own:
            raise ValueError(f'{STATE_FILE} is not what this command wrote')
        self.state = state
        path = self.folder / ROUNDS_FILE
        lines = path.read_bytes().splitlines(keepends=True) if path in files else []
        if lines and not lines[-1].endswith(b'\n'):
            # A killed program, or a full disk, may leave half a line.
            lines.pop()
            with whole_file(path) as name:
                name.write_bytes(b''.join(lines))
        for number, line in enumerate(lines, 1):
            try:
                self._keep(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f'{ROUNDS_FILE}, line {number}: {error!r}') from error
        unknown = {*self.found}.union(*self.rounds) - state['forms'].keys() - {TRUTH}
        if unknown:
            raise ValueError(f'{ROUNDS_FILE} has forms that {STATE_FILE} lacks: {", ".join(sorted(unknown))}')

    def _keep(self, line: dict) -> None:
        self.rounds.append({key: float(value) for key, value in line['times'].items()})
        for key, values in line['found'].items():
            self.found.setdefault(key, {})[int(line['image'])] = _from_json(values)


def _to_json(found: Detections) -> dict:
    values = dict(scores=found.scores.tolist(), labels=found.labels.tolist())
    if isinstance(found.regions, list):
        masks = [dict(size=[*mask['size']], counts=bytes(mask['counts']).decode('ascii')) for mask in found.regions]
        return dict(values, masks=masks)
    return dict(values, boxes=found.regions.tolist())


def _from_json(values: dict) -> Detections:
    if 'masks' in values:
        regions = [dict(mask, counts=mask['counts'].encode('ascii')) for mask in values['masks']]
    else:
        regions = np.array(values['boxes'], float).reshape(-1, 4)
    return Detections(np.array(values['scores'], float), np.array(values['labels'], np.int64), regions)
