"""Trains the runs of a study, some at a time, and writes its results, table and picture.

    python benchmarks/norms/run.py bccd-norms --data-root data/bccd --seeds 0 1 2 --jobs 2
    python benchmarks/norms/run.py bccd-hard --seeds 0 --only 'deep12_*'
    python benchmarks/norms/run.py bccd-norms --table-only

Studies are declared in benchmarks/norms/studies.py. Every run is a call of tools/train.py, printed before it starts,
in WORK_DIR/DATASET/RUN/seedN, with what it prints in output.txt there. Runs that are done are skipped, also those of
another study; one that was interrupted goes on. Several drivers may work on the same study: no run is done twice. A
run that fails does not stop the others. Results of what WORK_DIR has go into benchmarks/results/norms_STUDY.json after
each run, in place of what was there; with --keep-stored, runs and seeds stay that only benchmarks/results has, in the
file of any study of the dataset. At the end the table goes below the line `<!-- norms STUDY -->` of docs/results.md,
and the picture into docs/results_STUDY.png.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import os
import signal
import statistics
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatchcase

from benchmarks.experiments import ROOT, replace_table
from benchmarks.norms.figure import draw
from benchmarks.norms.jobs import Done, Evaluation, Job, Training, jobs_of
from benchmarks.norms.results import collect, with_stored, write_results
from benchmarks.norms.studies import STUDIES, Study
from benchmarks.norms.table import markdown


class Driver:
    """Runs the jobs of a study.

    Args:
        study: What to run.
        seeds: Of all its runs.
        work_dir: Where the folders of runs are.
        data_root: The folder of the dataset.
        root: Results, table and picture go below it.
        keep_stored: Keep results of the dataset that are stored there and not in ``work_dir``.
    """

    def __init__(
        self,
        study: Study,
        seeds: list[int],
        work_dir: Path,
        data_root: str,
        root: Path = ROOT,
        keep_stored: bool = False,
    ) -> None:
        self.study, self.seeds, self.work_dir, self.data_root, self.root = study, seeds, work_dir, data_root, root
        self.keep_stored = keep_stored
        self.results_file = root / 'benchmarks' / 'results' / f'norms_{study.name}.json'

    def run(self, parallel: int = 1, only: list[str] | None = None) -> list[str]:
        """Runs what is not done, and returns what did not end well: one line for each."""
        jobs = [
            job
            for job in jobs_of(self.study, self.seeds, self.work_dir, self.data_root)
            if not only or any(fnmatchcase(job.name, pattern) for pattern in only)
        ]
        if not jobs:
            raise SystemExit(
                f'--only {" ".join(only)}: {self.study.name} has no such run, but '
                f'{", ".join(run.name for run in (*self.study.runs, *self.study.recalibrations))}'
            )
        problems = {}
        # Evaluations are of trainings of the same study.
        for kind in (Training, Evaluation):
            self._run_all([job for job in jobs if isinstance(job, kind)], jobs, parallel, problems)
        self.collect()
        return list(problems.values())

    def _run_all(self, batch: list[Job], jobs: list[Job], parallel: int, problems: dict[str, str]) -> None:
        with ThreadPoolExecutor(parallel) as pool:
            waiting = {pool.submit(self._run_one, job, parallel): job for job in batch}
            try:
                for future in as_completed(waiting):
                    self._report(waiting[future], future.result(), jobs, parallel, problems)
            except BaseException:
                # Those that have not begun must not, and a signal may have reached this process alone.
                pool.shutdown(wait=False, cancel_futures=True)
                for job in batch:
                    job.stop()
                raise

    def _run_one(self, job: Job, parallel: int) -> tuple[bool, Done | str]:
        """Whether the job was run now, and how it ended."""
        if obstacle := job.obstacle():
            return False, obstacle
        if job.done is not None:
            return False, job.done
        return True, job.run(parallel)

    def _report(
        self, job: Job, outcome: tuple[bool, Done | str], jobs: list[Job], parallel: int, problems: dict[str, str]
    ) -> None:
        ran, end = outcome
        if isinstance(end, str):
            text = end
        elif end.status == 'failed':
            text = f'failed: {end.error}' + ('' if ran else f' (remove {job.folder / "done"} to try again)')
        else:
            text = 'finished'
        if text != 'finished':
            problems[str(job)] = f'{job} {text}'
        ended = [done for other in jobs if (done := other.done)]
        left = len(jobs) - len(ended)
        if ran:
            self.collect()
            text += f' in {end.seconds / 60:.1f} min' if isinstance(end, Done) else ''
            seconds = [done.seconds for done in ended if done.status == 'finished']
            if left and seconds:
                minutes = round(statistics.median(seconds) * left / parallel / 60)
                text += f'; about {minutes // 60}:{minutes % 60:02} h to go'
        print(f'[{len(ended)}/{len(jobs)}] {job} {text}', flush=True)

    def collect(self) -> dict:
        """Writes and returns the results so far."""
        results = collect(self.study, self.work_dir, self.data_root)
        if self.keep_stored:
            results = with_stored(results, self.study, self.results_file.parent)
        write_results(self.results_file, results)
        return results

    def publish(self) -> None:
        """Table and picture of the results in the file."""
        if not self.results_file.exists():
            raise SystemExit(f'{self.results_file} is not there: run the study first')
        results = json.loads(self.results_file.read_text())
        table = markdown(results)
        print(table)
        page, mark = self.root / 'docs' / 'results.md', f'norms {self.study.name}'
        if page.exists() and not replace_table(page, mark, table):
            print(f'{page} has no line <!-- {mark} -->: the table was not written there')
        draw(results, self.root / 'docs' / f'results_{self.study.name}.png')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('study', choices=STUDIES)
    parser.add_argument('--data-root', help='default: data/DATASET')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--only', nargs='+', metavar='NAME', help='only these runs; * matches anything')
    parser.add_argument('--jobs', type=int, default=1, metavar='N', help='runs at a time; above 1, each on one thread')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/norms'))
    parser.add_argument(
        '--keep-stored', action='store_true', help='add to the results in benchmarks/results instead of replacing them'
    )
    parser.add_argument('--table-only', action='store_true', help='run nothing: write table and picture again')
    args = parser.parse_args()
    study = STUDIES[args.study]
    os.chdir(ROOT)
    driver = Driver(
        study, args.seeds, args.work_dir, args.data_root or f'data/{study.base.name}', keep_stored=args.keep_stored
    )
    problems = []
    if not args.table_only:
        # As Ctrl-C: the trainings end with their driver.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        problems = driver.run(args.jobs, args.only)
    driver.publish()
    if problems:
        raise SystemExit('\n'.join(['', *problems]))


if __name__ == '__main__':
    main()
