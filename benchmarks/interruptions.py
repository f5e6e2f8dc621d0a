"""Kills trainings with SIGKILL, resumes each with ``--resume``, and compares the end with an uninterrupted run's.

    python benchmarks/interruptions.py --kills 20

Every run is tools/train.py in a process of its own, forked from one that has imported torch. The random points are
spread over what a run does: the decay of gamma, the writing of a checkpoint, the recalibration, the writing of the
recalibrated checkpoint and of the fused one. A kill in the middle of writing is certain: the process is stopped first,
and killed only if the file that it writes is still there. While a run lasts, all files under their final names must be
whole.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import ast
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from mmengine.config import Config

from slab_det.runtime.engine import read_checkpoint
from slab_det.measure.environment import describe_environment
from slab_det.runtime.errors import CheckpointError
from slab_det.measure.reporting import read_report

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.0005
# So long after SIGSTOP a process has stopped, but for a system call that it is in.
STOP_SECONDS = 0.02
# Less than an iteration or a pass of the recalibration.
MAX_DELAY = 0.2
FORK_SERVER = multiprocessing.get_context('forkserver')
FORK_SERVER.set_forkserver_preload(['slab_det.cli', 'mmdet.utils', 'mmdet.evaluation'])
TRAIN = str(ROOT / 'tools' / 'train.py')


@dataclass(frozen=True)
class KillPoint:
    """Where a run is killed.

    Attributes:
        kind: What the run does then.
        said: A text in its output that must have appeared.
        writes: Glob of the temporary file that it must be writing; None: nothing in particular.
        delay: Seconds from there to the kill.
    """

    kind: str
    said: str
    writes: str | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class Kill:
    """A kill and what came of it.

    Attributes:
        kind: See KillPoint.
        after: The last thing that the run had logged.
        unfinished: Files that it was writing.
        resumed_from: Checkpoint that ``--resume`` took; None: there was none yet, it began anew.
        weights: Largest difference of a weight or statistic of the last checkpoint from the uninterrupted run's.
        optimizer: The same of the optimizer's state.
        fused: The same of the fused checkpoint.
        gamma: Largest gamma of the last checkpoint.
        same_report: Whether AP, recalibration and fusion in report.json are equal.
        torn: Final names under which a file was found that is not whole.
        checks: How many files were looked at.
    """

    kind: str
    after: str
    unfinished: list[str]
    resumed_from: str | None
    weights: float
    optimizer: float
    fused: float
    gamma: float
    same_report: bool
    torn: list[str]
    checks: int


class WholeFiles:
    """Looks at a work directory again and again: what stands there under its final name must be whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checks = 0
        self.torn: list[str] = []
        self._seen: dict[str, tuple[int, int, int]] = {}

    def check(self) -> None:
        """Reads every file that has changed."""
        for entry in _files(self.folder):
            reader = _reader(entry.name)
            try:
                stat = entry.stat()
                stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                if reader is None or self._seen.get(entry.name) == stamp:
                    continue
                self._seen[entry.name] = stamp
                self.checks += 1
                reader(Path(entry.path))
            except Exception as error:
                # It may have been removed or replaced by now, which is not being torn.
                if os.path.exists(entry.path) and not isinstance(error, FileNotFoundError):
                    self.torn.append(f'{entry.name}: {error}')


def _reader(name: str) -> Callable[[Path], object] | None:
    if name.endswith('.pth'):
        return read_checkpoint
    readers = {'report.json': read_report, 'last_checkpoint': _follow_marker}
    return readers.get(name, (lambda path: ast.parse(_not_empty(path))) if name.endswith('.py') else None)


def _not_empty(path: Path) -> str:
    text = path.read_text()
    if not text.strip():
        raise ValueError('empty')
    return text


def _follow_marker(path: Path) -> None:
    for _ in range(2):
        named = _not_empty(path)
        try:
            read_checkpoint(named)
            return
        except (FileNotFoundError, CheckpointError):
            # Between the two readings the run may have gone on.
            if path.read_text() == named:
                raise


def _files(folder: Path) -> Iterator[os.DirEntry]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if entry.is_file() and not entry.name.startswith('.'))


def run_in_this_process(script: str, arguments: list[str], folder: str, output: str) -> None:
    """Runs ``python script arguments`` in ``folder``, with stdout and stderr at the end of the file ``output``."""
    os.chdir(folder)
    with open(output, 'a', buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout = open(1, 'w', buffering=1, closefd=False)
    sys.stderr = open(2, 'w', buffering=1, closefd=False)
    sys.argv = [script, *arguments]
    torch.set_num_threads(1)
    runpy.run_path(script, run_name='__main__')


class Interruptions:
    """Runs of one config, each in a work directory of its own below ``folder``.

    Args:
        config: A config of a short training with ProgressiveNormHook and RecalibrateFuseHook.
        folder: Where everything is written.
    """

    def __init__(self, config: Path, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        for earlier in self.folder.glob('killed-*'):
            shutil.rmtree(earlier) if earlier.is_dir() else earlier.unlink()
        shutil.rmtree(self.folder / 'uninterrupted', ignore_errors=True)
        self.train('uninterrupted', WholeFiles(folder / 'uninterrupted'))
        self._count = 0

    def kill(self, point: KillPoint, attempts: int = 5) -> Kill:
        """Kills a run at ``point``, resumes it and compares.

        Raises:
            RuntimeError: If a run ended before it could be killed, ``attempts`` times, or the resumed run fails.
        """
        for _ in range(attempts):
            self._count += 1
            name = f'killed-{self._count}'
            files = WholeFiles(self.folder / name)
            output = self._killed(name, point, files)
            if output is not None:
                break
        else:
            raise RuntimeError(f'{point}: no run of {attempts} could be killed there')
        files.check()
        unfinished = sorted(path.name for path in files.folder.glob('.*'))
        resumed = self.train(name, files, '--resume')
        said = resumed.read_text()
        _, found, rest = said.partition('Auto resumed from the latest checkpoint ')
        left = [path.name for path in files.folder.glob('.*')]
        if left:
            files.torn.append(f'left behind: {left}')
        kill = Kill(
            point.kind,
            _last_step(output),
            unfinished,
            Path(rest.split('.pth')[0]).name if found else None,
            **self._compare(files.folder),
            torn=files.torn,
            checks=files.checks,
        )
        shutil.rmtree(files.folder)
        return kill

    def train(self, name: str, files: WholeFiles, *arguments: str) -> Path:
        """Trains to the end and returns the path of the output."""
        output = self.folder / f'{name}-{"resumed" if arguments else "trained"}.txt'
        with self._process(name, output, *arguments) as process:
            while process.is_alive():
                files.check()
                time.sleep(0.05)
        files.check()
        if process.exitcode:
            raise RuntimeError(f'{name} failed with exit code {process.exitcode}:\n{output.read_text()[-3000:]}')
        return output

    def _killed(self, name: str, point: KillPoint, files: WholeFiles) -> Path | None:
        """The output of a run that was killed at ``point``; None if it ended before."""
        output = self.folder / f'{name}-killed.txt'
        with self._process(name, output) as process:
            while process.is_alive() and point.said not in _text(output):
                files.check()
                # What it writes takes longer to prepare.
                time.sleep(10 * POLL_SECONDS)
            while process.is_alive():
                if point.writes is None:
                    time.sleep(point.delay)
                    if process.is_alive():
                        process.kill()
                elif any(files.folder.glob(point.writes)):
                    time.sleep(point.delay)
                    os.kill(process.pid, signal.SIGSTOP)
                    time.sleep(STOP_SECONDS)
                    in_the_middle = any(files.folder.glob(point.writes))
                    os.kill(process.pid, signal.SIGKILL if in_the_middle else signal.SIGCONT)
                    process.join(1 if in_the_middle else 0)
                time.sleep(POLL_SECONDS)
        return output if process.exitcode == -signal.SIGKILL else None

    @contextmanager
    def _process(self, name: str, output: Path, *arguments: str) -> Iterator[multiprocessing.Process]:
        output.unlink(missing_ok=True)
        command = [str(self.config), '--work-dir', str(self.folder / name), *arguments]
        process = FORK_SERVER.Process(target=run_in_this_process, args=(TRAIN, command, str(self.folder), str(output)))
        process.start()
        try:
            yield process
            process.join()
        finally:
            process.kill()
            process.join()

    def _compare(self, run: Path) -> dict:
        reference = self.folder / 'uninterrupted'
        last = Path((reference / 'last_checkpoint').read_text()).name
        ours, theirs = read_checkpoint(run / last), read_checkpoint(reference / last)
        gamma = max(value.item() for key, value in ours['state_dict'].items() if key.endswith('_gamma'))
        facts = [
            [(e.ap, e.recalibration, e.fusion) for e in read_report(folder / 'report.json').entries]
            for folder in (run, reference)
        ]
        return dict(
            weights=largest_difference(ours['state_dict'], theirs['state_dict']),
            optimizer=largest_difference(ours['optimizer'], theirs['optimizer']),
            fused=largest_difference(*(read_checkpoint(path / 'fused.pth')['state_dict'] for path in (run, reference))),
            gamma=gamma,
            same_report=facts[0] == facts[1],
        )


def largest_difference(a: object, b: object) -> float:
    """Largest difference of two nested collections of tensors and numbers; infinite where they are not alike."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return torch.inf
        return max((largest_difference(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return torch.inf
        return max((largest_difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape:
            return torch.inf
        return (a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max().item() if a.numel() else 0.0
    return 0.0 if a == b else torch.inf


def _text(path: Path) -> str:
    return path.read_text(errors='replace') if path.exists() else ''


def _last_step(output: Path) -> str:
    marks = ('Iter(train)', 'Saving checkpoint', 'Recalibration, pass', 'Recalibrated', 'Fused')
    lines = [line for line in _text(output).splitlines() if any(mark in line for mark in marks)]
    return next(
        (line[line.index(mark) :][:40] for line in reversed(lines) for mark in marks if mark in line), 'nothing'
    )


def random_points(count: int, max_iters: int, interval: int, seed: int) -> list[KillPoint]:
    """Points of every kind in turn, three in ten during the decay."""
    generator = random.Random(seed)

    def decay() -> KillPoint:
        # It is over after 0.8 of the run.
        iteration = generator.randint(1, int(0.8 * max_iters) - 1)
        return KillPoint(
            'decay',
            f'Iter(train) [{iteration:>{len(str(max_iters))}}/{max_iters}]',
            delay=generator.uniform(0, MAX_DELAY),
        )

    def checkpoint() -> KillPoint:
        step = interval * generator.randint(1, max_iters // interval)
        return KillPoint('checkpoint', f'Saving checkpoint at {step} iterations', f'.iter_{step}.pth.*.tmp')

    def recalibration() -> KillPoint:
        return KillPoint(
            'recalibration', f'Recalibration, pass {generator.randint(1, 3)}', delay=generator.uniform(0, MAX_DELAY)
        )

    def recalibrated_checkpoint() -> KillPoint:
        return KillPoint('recalibrated checkpoint', 'Recalibration, pass 1', f'.iter_{max_iters}.pth.*.tmp')

    def fused_checkpoint() -> KillPoint:
        return KillPoint('fused checkpoint', 'Recalibration, pass 1', '.fused.pth.*.tmp')

    kinds = (
        decay,
        checkpoint,
        recalibration,
        fused_checkpoint,
        decay,
        checkpoint,
        recalibration,
        fused_checkpoint,
        decay,
        recalibrated_checkpoint,
    )
    return [kinds[i % len(kinds)]() for i in range(count)]


def write_configs(folder: Path, max_iters: int, interval: int, start_iters: int) -> tuple[Path, Path]:
    """Configs of a start without decay, so that there is an AP to lose, and of the run that is interrupted."""
    cfg = Config.fromfile(ROOT / 'configs' / 'quickstart_mask_rcnn_slab_swin.py')
    cfg.model.backbone.update(drop_path_rate=0.1)
    cfg.model.test_cfg.rpn.update(nms_pre=100, max_per_img=100)
    cfg.model.test_cfg.rcnn.max_per_img = 30
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.generator = dict(num_train=60, num_val=4, size=(128, 96))
        loader.num_workers = 0
        loader.persistent_workers = False
    cfg.train_dataloader.batch_size = 2
    cfg.param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20)]
    start = cfg.copy()
    start.train_cfg.update(max_iters=start_iters, val_interval=start_iters)
    start.default_hooks.checkpoint.interval = start_iters
    start.custom_hooks = []
    start.dump(folder / 'start.py')

    cfg.train_cfg.update(max_iters=max_iters, val_interval=max_iters // 2)
    # Keeping one is the hardest: mmengine alone removes it before it writes the next.
    cfg.default_hooks.checkpoint.update(interval=interval, max_keep_ckpts=1, save_best='coco/bbox_mAP', rule='greater')
    cfg.default_hooks.logger.interval = 1
    cfg.custom_hooks[1].update(num_images=6, max_passes=3, tol=0.0)
    cfg.load_from = str(folder / 'start' / f'iter_{start_iters}.pth')
    cfg.dump(folder / 'interrupted.py')
    return folder / 'start.py', folder / 'interrupted.py'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--iters', type=int, default=8)
    parser.add_argument('--start-iters', type=int, default=250, help='iterations before, for an AP above 0')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/interruptions'))
    args = parser.parse_args()
    folder = args.work_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    interval = 2
    start, interrupted = write_configs(folder, args.iters, interval, args.start_iters)
    process = FORK_SERVER.Process(
        target=run_in_this_process,
        args=(
            TRAIN,
            [str(start), '--work-dir', str(folder / 'start'), '--resume'],
            str(folder),
            str(folder / 'start.txt'),
        ),
    )
    process.start()
    process.join()
    runs = Interruptions(interrupted, folder)
    kills = []
    for point in random_points(args.kills, args.iters, interval, args.seed):
        kills.append(runs.kill(point))
        print(json.dumps(asdict(kills[-1])), flush=True)
    unfused = next(e for e in read_report(folder / 'uninterrupted' / 'report.json').entries if e.variant == 'unfused')
    summary = dict(
        kills=len(kills),
        by_kind={kind: sum(kill.kind == kind for kill in kills) for kind in dict.fromkeys(k.kind for k in kills)},
        equal_to_the_last_bit=sum(
            kill.weights == kill.optimizer == kill.fused == 0 and kill.same_report for kill in kills
        ),
        largest_difference=max(max(kill.weights, kill.optimizer, kill.fused) for kill in kills),
        largest_final_gamma=max(kill.gamma for kill in kills),
        killed_in_the_middle_of_a_file=sum(bool(kill.unfinished) for kill in kills),
        torn_files=sum(len(kill.torn) for kill in kills),
        files_checked=sum(kill.checks for kill in kills),
    )
    scope = dict(
        iterations=args.iters,
        checkpoint_interval=interval,
        max_keep_ckpts=1,
        batch_size=2,
        loader_workers=0,
        threads=1,
        seed=args.seed,
        ap_of_the_uninterrupted_run=unfused.ap,
    )
    path = ROOT / 'benchmarks' / 'results' / 'interruptions.json'
    path.write_text(
        json.dumps(
            dict(
                scope=scope, environment=describe_environment(), summary=summary, runs=[asdict(kill) for kill in kills]
            ),
            indent=1,
        )
        + '\n'
    )
    print(f'{json.dumps(summary, indent=1)}\nWritten to {path}')


if __name__ == '__main__':
    main()
