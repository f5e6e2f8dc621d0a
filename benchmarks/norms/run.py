"""Trains the runs of a study, one after the other, and adds their AP to its results and table.

    python benchmarks/norms/run.py bccd-norms --data-root data/bccd --seeds 0 1 2
    python benchmarks/norms/run.py dsb2018-recalibration --seeds 0 --only 'token_bn@*'
    python benchmarks/norms/run.py bccd-norms --table-only

Studies are declared in benchmarks/norms/studies.py. Every step is a command of tools/, printed before it runs, in
WORK_DIR/DATASET/RUN/seedN; steps that are done are skipped, and a training that was interrupted goes on. Results are
added to benchmarks/results/norms_STUDY.json, run by run and seed by seed, and the table goes below the line
`<!-- norms STUDY -->` of docs/results.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import os
import shutil
import subprocess
from fnmatch import fnmatchcase

from mmengine.config import Config
from mmengine.runner import find_latest_checkpoint

from benchmarks.experiments import ROOT, attempts, call, replace_table, tool
from benchmarks.norms.studies import STUDIES, Recalibration, Run, Study, lasting
from benchmarks.norms.table import latency_table, markdown
from slab_det.measure.report import AP_KINDS, ap_from_metrics, read_report

PAGE = Path('docs/results.md')


def run_config(study: Study, run: Run, seed: int) -> Config:
    """The base config with the changes of run and seed."""
    config = Config.fromfile(ROOT / study.base.config)
    for changes in (
        lasting(study.base.iterations, study.base.validations),
        *run.changes,
        dict(randomness=dict(seed=seed)),
    ):
        config.merge_from_dict(changes)
    return config


class Experiment:
    """The runs of a study with one seed, below ``folder``."""

    def __init__(self, study: Study, seed: int, folder: Path, data_root: str) -> None:
        self.study, self.seed, self.data = study, seed, ('--data-root', data_root)
        self.folder = folder / study.base.name

    def train(self, run: Run) -> dict:
        """Trains a run; keeps its checkpoint from before the recalibration as ``trained.pth``."""
        folder, config = self.folder / run.name / f'seed{self.seed}', run_config(self.study, run, self.seed)
        if not (folder / 'trained.pth').exists():
            unfinished = config.copy()
            hooks = [hook for hook in config.custom_hooks if hook['type'] != 'RecalibrateFuseHook']
            unfinished.custom_hooks = hooks
            self._train(unfinished, folder)
            shutil.copyfile(find_latest_checkpoint(str(folder)), folder / 'trained.pth')
        report = folder / 'report.json'
        if len(config.custom_hooks) > 1 and not report.exists():
            # After the last iteration, resuming is recalibrating and fusing.
            self._train(config, folder)
        metrics = [record for records in attempts(folder) for record in records if self._metric in record]
        trained = ap_from_metrics(metrics[0])
        if not report.exists():
            return self._result(trained)
        entry = read_report(report).entries[0]
        before = trained[self.study.base.metric]['AP']
        return self._result(entry.ap, ap_before_recalibration=before, recalibration=entry.recalibration)

    def recalibrate(self, how: Recalibration) -> dict:
        """Evaluates a trained run with other statistics."""
        trained = self.folder / how.run.name / f'seed{self.seed}'
        folder = self.folder / how.name / f'seed{self.seed}'
        config, checkpoint, numbers = trained / 'merged' / 'config.py', trained / 'trained.pth', folder / 'numbers.json'
        if not checkpoint.exists():
            self.train(how.run)
        if not (folder / 'report.json').exists():
            if how.num_images:
                passes = ('--max-passes', how.passes) if how.passes else ()
                options = ('--num-images', how.num_images, '--pipeline', how.pipeline, '--json', numbers)
                new = folder / 'recalibrated.pth'
                call(tool('recalibrate.py', config, checkpoint, '--out', new, *options, *passes, *self.data))
                checkpoint = new
            call(tool('test.py', config, checkpoint, '--work-dir', folder, *self.data))
        recalibration = json.loads(numbers.read_text()) if numbers.exists() else None
        return self._result(read_report(folder / 'report.json').entries[0].ap, recalibration=recalibration)

    @property
    def _metric(self) -> str:
        return f'coco/{self.study.base.metric}_mAP'

    def _train(self, config: Config, folder: Path) -> None:
        path = folder / 'merged' / 'config.py'
        path.parent.mkdir(parents=True, exist_ok=True)
        config.dump(path)
        call(tool('train.py', path, '--work-dir', folder, *self.data, '--resume'))

    def _result(self, ap: dict, **more: object) -> dict:
        return dict(status='finished', ap=ap[self.study.base.metric]['AP'], all_ap=ap, **more)


def add_result(file: Path, study: Study, run: Run | Recalibration, seed: int, result: dict) -> None:
    """Adds one run with one seed to the stored results."""
    if file.exists():
        results = json.loads(file.read_text())
    else:
        metric = f'{AP_KINDS[study.base.metric]} AP'
        results = dict(question=study.question, setting=study.base.setting, metric=metric, runs={})
    entry = results['runs'].setdefault(run.name, dict(seeds={}))
    entry |= dict(label=run.label, setting=run.setting, control=run.control)
    entry['seeds'][str(seed)] = result
    order = [declared.name for declared in study.recalibrations or study.runs]
    # Runs that are no longer declared stay, at the end.
    results['runs'] = dict(
        sorted(results['runs'].items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + '\n')


def publish(study: str, page: Path = PAGE, folder: Path = Path('benchmarks/results')) -> None:
    """Prints the tables of a study and writes them below their marks on the page."""
    results = json.loads((folder / f'norms_{study}.json').read_text())
    tables = {f'norms {study}': markdown(results)}
    latency = folder / f'norms_{study}_latency.json'
    if latency.exists():
        tables[f'latency {study}'] = latency_table(results, json.loads(latency.read_text())['runs'])
    for mark, table in tables.items():
        print(table)
        if not replace_table(page, mark, table):
            print(f'{page} has no line <!-- {mark} -->: the table was not written there')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('study', choices=STUDIES)
    parser.add_argument('--data-root', help='default: data/DATASET')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--only', nargs='+', metavar='NAME', default=['*'], help='only these rows; * matches anything')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/norms'))
    parser.add_argument('--table-only', action='store_true', help='run nothing: write the table again')
    args = parser.parse_args()
    study = STUDIES[args.study]
    os.chdir(ROOT)
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    rows = [row for row in study.recalibrations or study.runs if any(fnmatchcase(row.name, p) for p in args.only)]
    failed = []
    for seed in [] if args.table_only else args.seeds:
        experiment = Experiment(study, seed, args.work_dir, args.data_root or f'data/{study.base.name}')
        for row in rows:
            try:
                result = experiment.train(row) if isinstance(row, Run) else experiment.recalibrate(row)
            except subprocess.CalledProcessError:
                # A run that fails does not stop the others.
                failed.append(f'{row.name} seed {seed} failed: call again to go on, output above')
                continue
            add_result(Path(f'benchmarks/results/norms_{study.name}.json'), study, row, seed, result)
    publish(study.name)
    if failed:
        raise SystemExit('\n'.join(failed))


if __name__ == '__main__':
    main()
