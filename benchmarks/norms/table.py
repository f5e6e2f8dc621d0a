"""The table of a study: mean and std over seeds, and the paired difference to the control."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.experiments import listed, spread

# 97.5 % quantiles of Student's t by degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_QUANTILES = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
NONE = '–'


def markdown(results: Mapping) -> str:
    """One row per run; a run that failed says why."""
    runs = results['runs']
    header = [
        'run',
        f'{results["metric"]} per seed',
        'mean ± std',
        'minus control, per seed',
        'mean ± std',
        '95 % interval',
    ]
    align = ['---', '---', '---:', '---', '---:', '---']
    extra = {heading: column for heading, column in _EXTRA.items() if any(map(column, runs.values()))}
    lines = [[*header, *extra], [*align, *['---:'] * len(extra)]]
    for name, run in runs.items():
        own = by_seed(run)
        control = by_seed(runs[run['control']]) if run['control'] in runs and run['control'] != name else {}
        differences = [own[seed] - control[seed] for seed in own if seed in control]
        lines.append(
            [
                title(run),
                _seeds(run, own),
                spread(list(own.values()), '{:.3f}') if own else NONE,
                listed(differences, '{:+.3f}') or NONE,
                spread(differences, '{:+.3f}') if differences else NONE,
                _interval(differences),
                *(column(run) or NONE for column in extra.values()),
            ]
        )
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


def title(run: Mapping) -> str:
    """The label of a run, with its setting where that is not the study's."""
    return ': '.join(filter(None, [run['setting'], run['label']]))


def by_seed(run: Mapping, key: str = 'ap') -> dict[str, float]:
    """A value of each seed that finished and has it, in the order of the seeds."""
    finished = {int(seed): result for seed, result in run['seeds'].items() if result['status'] == 'finished'}
    return {str(seed): finished[seed][key] for seed in sorted(finished) if finished[seed].get(key) is not None}


def _before(run: Mapping) -> str:
    values = by_seed(run, 'ap_before_recalibration')
    return spread(list(values.values()), '{:.3f}') if values else ''


def _drift(run: Mapping) -> str:
    # Of evaluations alone: what a training ends with may have been recalibrated before.
    found = [value['drift'] for value in by_seed(run, 'recalibration').values() if 'drift' in value]
    # None is what was not finite.
    moved = [[drift[key] for drift in found] for key in ('mean', 'log_var')]
    return ' / '.join(NONE if None in values else f'{statistics.mean(values):.3f}' for values in moved) if found else ''


# Columns of what only some runs have.
_EXTRA = {'before recalibration': _before, 'statistics moved: mean in sigmas / log variance': _drift}


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


def _seeds(run: Mapping, own: Mapping[str, float]) -> str:
    failed = [
        f'seed {seed} failed: {_cell(result["error"])}'
        for seed, result in sorted(run['seeds'].items(), key=lambda item: int(item[0]))
        if result['status'] == 'failed'
    ]
    return '; '.join(filter(None, [listed(list(own.values()), '{:.3f}'), *failed]))


def _cell(text: str, width: int = 100) -> str:
    # A bar would end the cell.
    text = text.replace('|', '/')
    return text if len(text) <= width else f'{text[:width]}…'


def latency_table(results: Mapping, latency: Mapping) -> str:
    """AP and latency of the served models, with ratios to the run that each is compared with."""
    scopes = ('backbone+neck', 'detector')
    titles = ' | '.join(f'{scope}, ms | ratio' for scope in scopes)
    lines = [f'| run | {results["metric"]}, mean over seeds | {titles} |', f'|---|---:|{"---:|" * 2 * len(scopes)}']
    for name in latency:
        run = results['runs'][name]
        cells = [title(run), f'{statistics.mean(by_seed(run).values()):.3f}']
        for scope in scopes:
            own, control = (latency[key]['latency'][scope]['median_ms'] for key in (name, run['control']))
            cells += [f'{own:.1f}', f'{own / control:.2f}']
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)
