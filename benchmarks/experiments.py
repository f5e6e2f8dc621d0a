"""What the drivers of benchmarks/finetune and benchmarks/norms share: calling tools, reading logs, writing tables."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str, *arguments: object) -> list[str]:
    """The command that runs ``tools/name``, to be called in :data:`ROOT`."""
    return [sys.executable, f'tools/{name}', *map(str, arguments)]


def announce(command: Sequence[str]) -> None:
    """Prints a command as one would type it."""
    print('$', shlex.join(command), flush=True)


def call(command: Sequence[str]) -> None:
    """Prints and runs a command.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    announce(command)
    subprocess.run(command, check=True)


def attempts(work_dir: Path) -> list[list[dict]]:
    """What mmengine logged in a work directory: the records of each start of the run, oldest first."""
    # A line without an end is what a killed run was writing.
    return [
        [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith('\n')]
        for file in sorted(work_dir.glob('*/vis_data/scalars.json'))
    ]


def listed(values: Sequence[float], form: str) -> str:
    """All values, for one cell of a table."""
    return ', '.join(form.format(value) for value in values)


def spread(values: Sequence[float], form: str) -> str:
    """Mean and sample standard deviation, for one cell of a table; of one value there is no deviation."""
    mean = form.format(statistics.mean(values))
    return f'{mean} ± {statistics.stdev(values):.3f}' if len(values) > 1 else mean


def replace_table(page: Path, mark: str, table: str) -> bool:
    """Writes the table below the line ``<!-- mark -->`` of a page, in place of the rows that are there.

    Words around it stay as they are: they are written by hand.

    Returns:
        Whether the page has such a line.
    """
    text = page.read_text()
    line = f'<!-- {mark} -->\n'
    if line in text:
        page.write_text(re.sub(rf'(?<={re.escape(line)})(?:\|.*(?:\n|\Z))*', lambda _: f'{table}\n', text))
    return line in text
