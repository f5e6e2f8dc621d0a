"""Records of what was measured: reports, the machine and the versions, files of JSON, tables in Markdown.

Reports of fusion, recalibration, loading, conversion, absorption and latency are each a :class:`Record`. report.json,
optimize.json and benchmarks/results say by :func:`describe_environment` where they were made.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from slab_det.common.files import whole_file
from slab_det.machine import MACHINE, read_cpuinfo

# Of every record in a file.
SCHEMA = 1
NOT_RECORDED = 'not recorded'
ROOT = Path(__file__).parents[2]
LIBRARIES = ('torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'slab_det')
# What runs some forms, where it is installed.
EXTRAS = ('onnxruntime', 'openvino', 'triton')


class Record:
    """Base of dataclasses of what was done or measured."""

    def to_dict(self) -> dict:
        """The attributes as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> Any:
        """Reads the attributes from a mapping that may hold others too."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def lines(self) -> Iterable[str]:
        """What a person reads."""
        return [repr(self)]

    def __str__(self) -> str:
        return '\n'.join(self.lines())


def describe_commit() -> str:
    """The commit of this checkout, with '-dirty' if files were changed since.

    Elsewhere, as on a measuring machine that has the files alone, the variable SLAB_DET_COMMIT.
    """
    command = ['git', '--no-optional-locks', 'describe', '--always', '--dirty', '--exclude', '*']
    # An installed package may lie in somebody else's checkout.
    if (ROOT / '.git').exists():
        with suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return os.environ.get('SLAB_DET_COMMIT', NOT_RECORDED)


def device_name(device: torch.device | str) -> str:
    """Returns the product name of a device, for example 'NVIDIA H200' or 'Intel(R) Xeon(R) Platinum 8481C'."""
    device = torch.device(device)
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    # On most Linux distributions platform.processor() is empty or 'x86_64'.
    found = dict(re.findall(r'^(.+?)\s*: (.*?)\s*$', read_cpuinfo(), flags=re.MULTILINE))
    if 'model name' not in found:
        return platform.processor() or platform.machine()
    # Virtual machines name every EPYC generation 'AMD EPYC'; family and model tell them apart.
    return f'{found["model name"]} (family {found.get("cpu family")}, model {found.get("model")})'


def describe_code() -> dict:
    """Returns the ``commit`` of slab_det, and the ``versions`` of Python and of the libraries."""
    versions = {name: import_module(name).__version__ for name in LIBRARIES}
    for name in EXTRAS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {'commit': describe_commit(), 'versions': {'python': platform.python_version(), **versions}}


def describe_environment(device: torch.device | str = 'cpu') -> dict:
    """Returns where a measurement on ``device`` is made: code, device, CPU and its instructions, threads, TF32."""
    return {
        **describe_code(),
        'device': device_name(device),
        'cpu': device_name('cpu'),
        'instructions': ' '.join(MACHINE.instructions) or NOT_RECORDED,
        'threads': torch.get_num_threads(),
        'tf32_matmul': torch.backends.cuda.matmul.allow_tf32,
        'tf32_cudnn': torch.backends.cudnn.allow_tf32,
        'platform': platform.platform(),
    }


def to_plain(values: Any, default: Callable | None = None) -> Any:
    """Returns values as JSON reads them back: tuples become lists.

    Args:
        values: Nested values.
        default: Turns a value that JSON cannot hold into one that it can.

    Raises:
        TypeError: If JSON cannot hold a value.
    """
    return json.loads(json.dumps(values, default=default))


def to_json(record: Mapping) -> str:
    """The text of the file of a record, with :data:`SCHEMA`; ValueError for NaN and infinities, which JSON lacks."""
    return json.dumps({**record, 'schema': SCHEMA}, indent=1, allow_nan=False) + '\n'


def write_record(path: str | Path, record: Mapping) -> None:
    """Writes a file as a whole, by :func:`to_json`; after an error an older file stays."""
    text = to_json(record)
    with whole_file(path) as name:
        name.write_text(text)


def read_record(path: str | Path) -> dict:
    """Reads what :func:`write_record` wrote; ValueError, KeyError or TypeError for any other file."""
    record = json.loads(Path(path).read_text())
    if record['schema'] != SCHEMA:
        raise ValueError(f'schema {record["schema"]}, expected {SCHEMA}')
    return record


def format_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table without a newline at its end; the first column is aligned left, the others right."""
    lines = [f'| {" | ".join(cells)} |' for cells in (titles, *rows)]
    lines[0] = lines[0].replace('|  |', '| |')
    lines.insert(1, '|---|' + '---:|' * (len(titles) - 1))
    return '\n'.join(lines)


def format_digits(value: float) -> str:
    """Three digits, or all of a larger number."""
    return f'{value:.0f}' if value >= 1000 else f'{value:.3g}'


def format_ratio(ratio: float, quartiles: Sequence[float]) -> str:
    """A ratio of times with its quartiles, such as '0.82 (0.80 to 0.85)'."""
    low, high = quartiles
    return f'{ratio:.2f} ({low:.2f} to {high:.2f})'
