"""The table of a study: mean and std over seeds, and the paired difference to the control."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

# 97.5 % quantiles of Student's t by degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_QUANTILES = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
NONE = '–'
BEFORE = 'ap_before_recalibration'


def markdown(results: Mapping) -> str:
    """One row per run."""
    runs = results['runs']
    header = ['run', f'{results["metric"]} per seed', 'mean ± std', 'minus control', '95 % interval']
    align = ['---', '---', '---:', '---:', '---:']
    recalibrated = any(_mean(run, BEFORE) for run in runs.values())
    lines = [header + ['before recalibration'] * recalibrated, align + ['---:'] * recalibrated]
    for name, run in runs.items():
        own = by_seed(run)
        control = by_seed(runs[run['control']]) if run['control'] in runs and run['control'] != name else {}
        differences = [own[seed] - control[seed] for seed in own if seed in control]
        lines.append(
            [
                run['label'],
                ', '.join(f'{value:.3f}' for value in own.values()),
                _mean(run) or NONE,
                spread(differences, '{:+.3f}') if differences else NONE,
                _interval(differences),
                *[_mean(run, BEFORE) or NONE] * recalibrated,
            ]
        )
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


def spread(values: Sequence[float], form: str) -> str:
    """Mean and sample standard deviation, for one cell; of one value there is no deviation."""
    mean = form.format(statistics.mean(values))
    return f'{mean} ± {statistics.stdev(values):.3f}' if len(values) > 1 else mean


def replace_table(page: Path, mark: str, table: str) -> None:
    """Writes the table below the line ``<!-- mark -->`` of a page, in place of the rows that are there.

    Words around it stay as they are: they are written by hand.

    Raises:
        ValueError: If the page has no such line.
    """
    line = f'<!-- {mark} -->\n'
    if line not in page.read_text():
        raise ValueError(f'{page} has no line {line.strip()}; write it where the table belongs')
    text = re.sub(rf'(?<={re.escape(line)})(?:\|.*(?:\n|\Z))*', lambda _: f'{table}\n', page.read_text())
    page.write_text(text)


def by_seed(run: Mapping, key: str = 'ap') -> dict[str, float]:
    """A value of each seed that has it, in the order of the seeds."""
    seeds = sorted(run['seeds'], key=int)
    return {seed: run['seeds'][seed][key] for seed in seeds if run['seeds'][seed].get(key) is not None}


def _mean(run: Mapping, key: str = 'ap') -> str:
    values = by_seed(run, key)
    return spread(list(values.values()), '{:.3f}') if values else ''


def t_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean of paired differences d_1 ... d_n over seeds.

    mean(d) -/+ t(0.975, n - 1) * std(d) / sqrt(n), with the sample standard deviation (n - 1 in its denominator).
    It takes the differences as normal and the seeds as the only source of noise: the validation images are always the
    same. Of twenty in a table one excludes 0 by chance. None below 3 seeds, where it says nothing, and above 10.
    """
    quantile = T_QUANTILES.get(len(differences) - 1)
    if quantile is None:
        return None
    mean = statistics.mean(differences)
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean - half, mean + half


def _interval(differences: Sequence[float]) -> str:
    bounds = t_interval(differences)
    return '[{:+.3f}, {:+.3f}]'.format(*bounds) if bounds else NONE
