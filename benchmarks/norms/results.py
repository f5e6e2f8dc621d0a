"""Collects what the runs of a study left behind into one dictionary, and writes it as JSON."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

from mmengine.fileio import put_text

from benchmarks.experiments import attempts
from slab_det.measure.reporting import AP_KINDS, ap_from_metrics, read_report

from .jobs import Evaluation, Job, jobs_of
from .studies import STUDIES, Recalibration, Run, Study

TIME_NOTE = (
    'seconds_per_iteration is the median over the run. Two runs may be compared by it only where each ran '
    'alone on the machine: jobs says how many of this driver ran beside it, nothing knows of other programs.'
)


def collect(study: Study, root: Path, data_root: str) -> dict:
    """Everything that finished or failed so far, of all seeds.

    Runs that were trained with another config than the study has now are left out.
    """
    seeds = sorted({int(folder.name.removeprefix('seed')) for folder in (root / study.base.name).glob('*/seed*')})
    jobs = [job for job in jobs_of(study, seeds, root, data_root) if job.done and not job.obstacle()]
    runs = {}
    for run in study.recalibrations or study.runs:
        by_seed = {str(job.seed): describe(job, study.base.metric) for job in jobs if job.name == run.name}
        if by_seed:
            runs[run.name] = _entry(run, by_seed)
    return dict(
        study=study.name,
        question=study.question,
        setting=study.base.setting,
        metric=AP_KINDS[study.base.metric] + ' AP',
        time_note=TIME_NOTE,
        runs=runs,
        environments=_environments(jobs),
    )


def with_stored(results: dict, study: Study, folder: Path) -> dict:
    """Results, and beside them the runs and seeds that only the files in ``folder`` have, of any study of the dataset.

    Nothing says with which config those were trained; they are taken to be of the run that has their name.
    """
    runs, environments = {}, list(results['environments'])
    others = [other for other in STUDIES.values() if other.base.name == study.base.name and other.name != study.name]
    stored = [
        json.loads(file.read_text())
        for other in (*others, study)
        if (file := folder / f'norms_{other.name}.json').exists()
    ]
    for run in study.recalibrations or study.runs:
        # The last that has a seed counts.
        records = [record for record in (*stored, results) if run.name in record['runs']]
        by_seed = {seed: one for record in records for seed, one in record['runs'][run.name]['seeds'].items()}
        if by_seed:
            runs[run.name] = _entry(run, dict(sorted(by_seed.items(), key=lambda item: int(item[0]))))
        for environment in (one for record in records for one in record['environments']):
            if environment not in environments:
                environments.append(environment)
    return dict(results, runs=runs, environments=environments)


def _entry(run: Run | Recalibration, by_seed: dict[str, dict]) -> dict:
    return dict(label=run.label, setting=run.setting, control=run.control, seeds=by_seed)


def describe(job: Job, metric: str) -> dict:
    """One job that ended: its AP after and before the recalibration, how it went, and its curves."""
    done, report_file = job.done, job.folder / 'report.json'
    curves = read_curves(job.folder, metric)
    last_ap = curves.pop('last_ap')
    result = dict(status=done.status, seconds=done.seconds, jobs=done.jobs)
    if done.status == 'failed':
        return dict(**result, error=done.error, **curves)
    if isinstance(job, Evaluation):
        recalibration_file = job.folder / 'recalibration.json'
        recalibration = json.loads(recalibration_file.read_text()) if recalibration_file.exists() else None
        if recalibration is not None and not job.starts_as_trained:
            # From statistics that were not those of the training.
            del recalibration['drift']
        ap = read_report(report_file).entries[0].ap
        return dict(**result, ap=ap[metric]['AP'], all_ap=ap, recalibration=recalibration)
    validations = curves['validations']
    before = validations['ap'][-1] if validations['ap'] else None
    result.update(ap=before, ap_before_recalibration=None, all_ap=last_ap, recalibration=None)
    if report_file.exists():
        # LayerNorm has none, and nor has a run whose gamma did not reach 0.
        unfused = read_report(report_file).entries[0]
        result.update(
            ap=unfused.ap[metric]['AP'],
            ap_before_recalibration=before,
            all_ap=unfused.ap,
            recalibration=unfused.recalibration,
        )
    return dict(**result, **curves)


def _environments(jobs: list[Job]) -> list[dict]:
    """Where the runs ran, each place once, as far as they wrote it down: those with LayerNorm do not."""
    found = []
    for job in jobs:
        report_file = job.folder / 'report.json'
        environment = read_report(report_file).entries[0].environment if report_file.exists() else None
        if environment and environment not in found:
            found.append(environment)
    return found


def read_curves(work_dir: Path, metric: str) -> dict:
    """Losses and APs of a run by iteration; where it was resumed, those of the attempt that went on."""
    training, validations = {}, {}
    for record in (record for attempt in attempts(work_dir) for record in attempt):
        if 'loss' in record:
            training[record['step']] = record
        elif f'coco/{metric}_mAP' in record:
            validations[record['step']] = record
    training, validations = (dict(sorted(records.items())) for records in (training, validations))
    logged = dict(iteration=list(training))
    for name in ('loss', 'grad_norm', 'gamma', 'un_filtered', 'drift_mean', 'drift_log_var'):
        if any(name in record for record in training.values()):
            logged[name] = [_rounded(record.get(name)) for record in training.values()]
    times = [record['time'] for record in training.values()]
    return dict(
        seconds_per_iteration=round(statistics.median(times), 4) if times else None,
        training=logged,
        validations=dict(
            iteration=list(validations), ap=[record[f'coco/{metric}_mAP'] for record in validations.values()]
        ),
        last_ap=ap_from_metrics(list(validations.values())[-1]) if validations else None,
    )


def _rounded(value: float | None) -> float | None:
    """Five digits; None for what is not finite, which JSON cannot say."""
    return float(f'{value:.5g}') if value is not None and math.isfinite(value) else None


def write_results(path: Path, results: dict) -> None:
    """Writes JSON with each list of numbers on one line."""
    text = json.dumps(results, indent=1, allow_nan=False)
    text = re.sub(r'\[\s+([^\[\]{}"]*?)\s+\]', lambda found: f'[{" ".join(found[1].split())}]', text)
    path.parent.mkdir(parents=True, exist_ok=True)
    put_text(f'{text}\n', str(path))
