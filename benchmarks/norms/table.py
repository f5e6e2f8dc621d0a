"""The table of a study: mean and standard deviation over seeds, and the paired difference to the control."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from slab_det.common.record import format_table

# 97.5 % quantiles of Student's t by degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_QUANTILES = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
NONE = '–'
BEFORE = 'AP_before_recalibration'


def study_table(rows: Sequence[dict], metric: str) -> str:
    """One line for each name, over its seeds; AP is shown from 0 to 100.

    Args:
        rows: Dicts with ``name``, ``seed`` and ``AP``; perhaps with ``control``, the name of the run that is
            subtracted, and with ``AP_before_recalibration``.
        metric: What the AP is called.
    """
    titles = ['run', f'{metric} per seed', 'mean ± std', 'minus control', '95 % interval']
    recalibrated = any(BEFORE in row for row in rows)
    titles += ['before recalibration'] * recalibrated
    lines = []
    for name, control in {row['name']: row.get('control') for row in rows}.items():
        ap, base, before = by_seed(rows, name), by_seed(rows, control), by_seed(rows, name, BEFORE)
        differences = [ap[seed] - base[seed] for seed in ap if seed in base]
        line = [name, ', '.join(f'{100 * value:.1f}' for value in ap.values()), spread(ap.values())]
        line += [spread(differences, '{:+.1f}'), t_interval(differences)]
        lines.append([*line, *[spread(before.values())] * recalibrated])
    return format_table(titles, lines)


def by_seed(rows: Sequence[dict], name: str | None, key: str = 'AP') -> dict[int, float]:
    """A value of each seed that has it, in the order of the seeds."""
    values = {row['seed']: row[key] for row in rows if row['name'] == name and key in row}
    return dict(sorted(values.items()))


def spread(values: Sequence[float], form: str = '{:.1f}') -> str:
    """Mean and sample standard deviation of AP, times 100, for one cell; one value has no deviation."""
    values = [100 * value for value in values]
    if not values:
        return NONE
    mean = form.format(statistics.mean(values))
    return f'{mean} ± {statistics.stdev(values):.1f}' if len(values) > 1 else mean


def replace_table(page: Path, mark: str, table: str) -> None:
    """Writes a table or a paragraph below the line ``<!-- mark -->`` of a page, in place of the lines that are there.

    It ends at the next empty line. Words around it stay as they are: they are written by hand.

    Raises:
        ValueError: If the page has no such line.
    """
    line = f'<!-- {mark} -->\n'
    if line not in page.read_text():
        raise ValueError(f'{page} has no line {line.strip()}; write it where the table belongs')
    text = re.sub(rf'(?<={re.escape(line)})(?:.+(?:\n|\Z))*', lambda _: f'{table}\n', page.read_text())
    page.write_text(text)


def t_interval(differences: Sequence[float]) -> str:
    """The 95 % confidence interval of the mean of paired differences d_1 ... d_n of AP over seeds, times 100.

    mean(d) -/+ t(0.975, n - 1) * std(d) / sqrt(n), with the sample standard deviation (n - 1 in its denominator).
    It takes the differences as normal and the seeds as the only source of noise: the validation images are always the
    same. One interval in twenty excludes 0 by chance. Below 3 seeds an interval says nothing; above 10 there are none.
    """
    quantile = T_QUANTILES.get(len(differences) - 1)
    if quantile is None:
        return NONE
    mean = statistics.mean(differences)
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return f'[{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]'
