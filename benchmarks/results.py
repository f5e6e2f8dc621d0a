"""Reads and writes the files of benchmarks/results, which have one row for each thing that was measured:

    {"setting": {...}, "environments": [{...}], "rows": [{"name": ..., "seed": ..., "environment": 0, ...}]}

The setting holds for every row. The environment of a row is its index in the list: the commit of this repository, the
device and the versions. What an old file does not hold is "not recorded".
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slab_det.common.files import locked, whole_file
from slab_det.common.record import describe_commit, describe_environment, to_plain

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'benchmarks' / 'results'


class Results:
    """The rows of one file.

    Args:
        path: The file, which need not exist.
        device: Device that new rows are measured on.
        setting: What holds for every row.

    Raises:
        ValueError: If the file was measured in another setting.
    """

    def __init__(self, path: Path, device: str = 'cpu', **setting: object) -> None:
        self.path, self.device = path, device
        # Of the code that is loaded: files may change while a study runs.
        self.commit = describe_commit()
        self.environments: list[dict] = []
        self.rows: list[dict] = []
        stored, setting = self._read(), to_plain(setting)
        self.setting: dict = setting | stored.get('setting', {})
        for key, value in setting.items():
            if self.setting[key] != value:
                raise ValueError(f'{path} has {key} {self.setting[key]}, not {value}; move it away or write elsewhere')

    def _read(self) -> dict:
        stored = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.environments, self.rows = (stored.get(key, getattr(self, key)) for key in ('environments', 'rows'))
        return stored

    def select(self, **values: object) -> list[dict]:
        """The rows that have these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in values.items())]

    def add(self, identity: dict, values: dict) -> dict:
        """Adds a row, or replaces the row of this identity, and writes the file, which another script may have changed.

        Args:
            identity: What tells the row from others, such as its name and seed.
            values: What was measured.
        """
        environment = describe_environment(self.device) | dict(commit=self.commit)
        with locked(self.path):
            self._read()
            if environment not in self.environments:
                self.environments.append(environment)
            row = {**identity, **values, 'environment': self.environments.index(environment)}
            known = self.select(**identity)
            if known:
                self.rows[self.rows.index(known[0])] = row
            else:
                self.rows.append(row)
            self.write()
        return row

    def measure_once(self, identity: dict, measure: Callable[[], dict]) -> dict:
        """The stored row of this identity, or else what ``measure`` returns, with its seconds, as a new row."""
        known = self.select(**identity)
        if known:
            return known[0]
        started = time.perf_counter()
        values = measure()
        return self.add(identity, dict(**values, seconds=round(time.perf_counter() - started, 1)))

    def write(self) -> None:
        """Writes the file, one line for each row."""
        dumps = partial(json.dumps, allow_nan=False)
        lists = [
            f' "{key}": [\n  ' + ',\n  '.join(map(dumps, values)) + '\n ]'
            for key, values in (('environments', self.environments), ('rows', self.rows))
        ]
        with whole_file(self.path) as name:
            name.write_text('{\n' + ',\n'.join([f' "setting": {dumps(self.setting)}', *lists]) + '\n}\n')
