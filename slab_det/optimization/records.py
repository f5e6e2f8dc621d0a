"""Records of a measurement: the times and detections of each round, in a file that an interrupted run goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slab_det.compare.agreement import Detections
from slab_det.runtime.run_folder import whole_file

STATE, ROUNDS = 'state.json', 'rounds.jsonl'


class Records:
    """What was measured so far, in the folder ``work`` of an optimization.

    Attributes:
        state: Values that JSON can hold, saved by :meth:`save`.
        rounds: The milliseconds of each form, by its key, on one image; one dict per round.
        found: The detections of each form, by its key, in each image, by its index.

    Args:
        folder: The folder; it need not exist.
        key: What the records depend on, by name: values that JSON can hold. Records of another key are dropped.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder, self.dropped = folder, ''
        self.rounds: list[dict[str, float]] = []
        self.found: dict[str, dict[int, Detections]] = {}
        self.state: dict = dict(key=dict(key))
        path = folder / STATE
        if path.is_file():
            state = json.loads(path.read_text())
            changed = [name for name in key if state['key'].get(name) != key[name]]
            if changed:
                self.dropped = ', '.join(changed)
                self.remove_files()
            else:
                self.state = state
        self._read_rounds()
        self.save()

    def remove_files(self) -> None:
        """Removes every file of the folder."""
        for path in sorted(self.folder.rglob('*'), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def save(self) -> None:
        """Writes ``state``."""
        with whole_file(self.folder / STATE) as name:
            name.write_text(json.dumps(self.state, indent=1))

    def add(self, image: int, times: Mapping[str, float], found: Mapping[str, Detections]) -> None:
        """Adds a round, to the file too.

        Args:
            image: Index of the image.
            times: Milliseconds of each form, by its key.
            found: Detections of the forms that had not seen the image before.
        """
        line = dict(image=image, times=dict(times), found={key: _to_json(value) for key, value in found.items()})
        path = self.folder / ROUNDS
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

    def times(self, key: str) -> np.ndarray:
        """The milliseconds of a form in each of its rounds."""
        return np.array([times[key] for times in self.rounds if key in times])

    def ratios(self, key: str, base: str) -> np.ndarray:
        """The time of a form over the time of ``base`` in the same round."""
        return np.array([times[key] / times[base] for times in self.rounds if key in times and base in times])

    def pairs(self, key: str, base: str) -> tuple[list[Detections], list[Detections]]:
        """The detections of ``base`` and of a form in each image that both have seen."""
        mine, theirs = self.found.get(base, {}), self.found.get(key, {})
        images = sorted(mine.keys() & theirs.keys())
        return [mine[i] for i in images], [theirs[i] for i in images]

    def _read_rounds(self) -> None:
        path = self.folder / ROUNDS
        if not path.is_file():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b'\n'):
            # A killed program, or a full disk, may leave half a line.
            lines.pop()
            with whole_file(path) as name:
                name.write_bytes(b''.join(lines))
        for line in lines:
            self._keep(json.loads(line))

    def _keep(self, line: dict) -> None:
        self.rounds.append(line['times'])
        for key, values in line['found'].items():
            self.found.setdefault(key, {})[line['image']] = _from_json(values)


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
