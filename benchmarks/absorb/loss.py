"""Fits the loss of AP that an agreement means, to every student of benchmarks/results that has both.

    python -m benchmarks.absorb.loss

Students whose heads lost channels, too, are left out of the fit and listed: their boxes move a little, which agreement
counts and AP hardly does, so that their agreement announces more than they lose. Students of a form that is gone are
left out altogether.
The model is `loss = c (AP (1 - agreement))^2`, AP being the teacher's, all from 0 to 1. Each file is also predicted
from the others: a c that only fits the detectors it was fitted to would err there.
"""

import argparse
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.results import FOLDER
from slab_det.compare.agreement import expected_loss
from slab_det.runtime.record import format_table

# Students of a form that is gone: with a matrix A beside each pruned FFN.
ABANDONED = re.compile(r'\bA\b')


class Students(NamedTuple):
    """The students of one file, and their teachers: (N,) each, from 0 to 1."""

    teacher: np.ndarray
    agreement: np.ndarray
    loss: np.ndarray

    @property
    def scale(self) -> np.ndarray:
        """What the loss is proportional to."""
        return (self.teacher * (1 - self.agreement)) ** 2


def read_students(file: Path, with_heads: bool = False) -> Students | None:
    """Reads the students of a file, or those whose heads lost channels; None if it has none."""
    rows = json.loads(file.read_text())['rows']
    teachers = {row['seed']: row['AP'] for row in rows if row.get('name') == 'teacher'}
    students = [row for row in rows if {'AP', 'agreement'} <= row.keys() and row['seed'] in teachers]
    students = [row for row in students if ('share' in row) == with_heads and not ABANDONED.search(row['name'])]
    if not students:
        return None
    teacher = np.array([teachers[row['seed']] for row in students])
    ap = np.array([row['AP'] for row in students])
    return Students(teacher, np.array([row['agreement'] for row in students]), teacher - ap)


def fit(groups: list[Students]) -> float:
    """The least-squares c."""
    scale, loss = (np.concatenate([getattr(group, name) for group in groups]) for name in ('scale', 'loss'))
    return float(scale @ loss / (scale @ scale))


def find_students(with_heads: bool = False) -> dict[str, Students]:
    """See :func:`read_students`; by the name of the file."""
    files = sorted([*FOLDER.glob('absorb_*.json'), *FOLDER.glob('ffn_*.json')])
    return {file.name: students for file in files if (students := read_students(file, with_heads))}


def table(groups: dict[str, Students]) -> str:
    """The table of benchmarks/README.md."""
    rows, errors = [], []
    for name, group in groups.items():
        error = 100 * (group.loss - fit([other for key, other in groups.items() if key != name]) * group.scale)
        errors.append(error)
        ranges = ((values.min(), values.max()) for values in (group.teacher, group.loss))
        teacher, loss = (f'{100 * low:.1f} to {100 * high:.1f}' for low, high in ranges)
        agreement = f'{group.agreement.min():.2f} to {group.agreement.max():.2f}'
        rows.append((f'`{name}`', str(len(error)), teacher, agreement, loss, f'{np.sqrt((error**2).mean()):.1f}'))
    everything = np.concatenate(errors)
    share = f'{np.mean(everything <= 1):.0%} lost at most 1.0 more'
    rows.append(('all', str(len(everything)), '', '', share, f'{np.sqrt((everything**2).mean()):.1f}'))
    titles = ('file', 'students', "teachers' AP", 'agreement', 'lost AP', 'error, predicted from the other files (rms)')
    return format_table(titles, rows)


def heads_table(groups: dict[str, Students]) -> str:
    """The students whose heads lost channels: what their agreement announces, and what they lost."""
    rows = [
        (f'`{name}`', f'{value:.3f}', f'{100 * expected_loss(value, ap):.1f}', f'{100 * loss:.1f}')
        for name, group in groups.items()
        for ap, value, loss in zip(*group, strict=True)
    ]
    return format_table(('heads pruned too', 'agreement', 'announced', 'lost AP'), rows)


if __name__ == '__main__':
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = find_students()
    print(f'c = {fit([*found.values()]):.2f}\n\n{table(found)}\n\n{heads_table(find_students(with_heads=True))}')
