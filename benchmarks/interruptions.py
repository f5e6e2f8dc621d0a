"""Kills trainings with SIGKILL, resumes each with ``--resume``, and compares the end with an uninterrupted run's.

    python -m benchmarks.interruptions --kills 20

Every run is tools/train.py in a process of its own, forked from one that has imported torch. A kill in the middle of
writing is certain: the process is stopped first, and killed only if the file that it writes is still there. While a run
lasts, all files under their final names must be whole.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from mmengine.config import Config

from slab_det.measure.environment import describe_environment
from slab_det.measure.report import read_report
from slab_det.runtime import read_checkpoint

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.0005
# A process stops within this time after SIGSTOP, unless it is inside a system call.
STOP_SECONDS = 0.02
FORK_SERVER = multiprocessing.get_context('forkserver')
FORK_SERVER.set_forkserver_preload(['slab_det.cli.config', 'slab_det.backbones', 'mmdet.utils', 'mmdet.evaluation'])
TRAIN = str(ROOT / 'tools' / 'train.py')


@dataclass(frozen=True)
class KillPoint:
    """Where a run is killed: ``delay`` seconds after it ``said`` a text, or while it ``writes`` a file (a glob)."""

    kind: str
    said: str
    writes: str | None = None
    delay: float = 0.0


class WholeFiles:
    """Looks at a work directory again and again: every file under its final name must be whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.torn: list[str] = []
        self._seen: dict[str, tuple[int, int, int]] = {}

    def check(self) -> None:
        """Reads every file that has changed."""
        for path in self.folder.glob('[!.]*'):
            try:
                stat = path.stat()
                stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                if self._seen.get(path.name) != stamp and path.is_file():
                    self._seen[path.name] = stamp
                    _read(path)
            except Exception as error:
                # A file that is removed or replaced meanwhile is not torn.
                if path.exists() and not isinstance(error, FileNotFoundError):
                    self.torn.append(f'{path.name}: {error}')


def _read(path: Path) -> None:
    """Reads a file of a run, and raises where it is not whole."""
    if path.suffix == '.pth':
        read_checkpoint(path)
    elif path.name == 'fused_config.py' and not ast.parse(path.read_text()).body:
        raise ValueError('empty')
    elif path.name == 'report.json':
        read_report(path)


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
    """Runs of one config, each in a new work directory of its own below ``folder``.

    Args:
        config: A config of a short training with ProgressiveNormHook and RecalibrateFuseHook.
        folder: Where everything is written.
    """

    def __init__(self, config: Path, folder: Path) -> None:
        self.config, self.folder, self._count = config, folder, 0
        self._train('uninterrupted', WholeFiles(folder / 'uninterrupted'))

    def kill(self, point: KillPoint, attempts: int = 5) -> dict:
        """Kills a run at ``point``, resumes it and compares.

        Returns:
            ``unfinished``: files that the run was writing; ``resumed_from``: the checkpoint that ``--resume`` took;
            ``torn``: files that were found under a final name and were not whole; and how the end differs from the
            uninterrupted run's: ``largest_difference`` of the last checkpoint, its optimizer, its averaged weights
            and the fused checkpoint, ``gamma``, ``same_report``.

        Raises:
            RuntimeError: If a run ended before it could be killed, ``attempts`` times, or the resumed run fails.
        """
        for _ in range(attempts):
            self._count += 1
            files = WholeFiles(self.folder / f'killed-{self._count}')
            if self._kill(point, files):
                break
        else:
            raise RuntimeError(f'{point}: no run of {attempts} could be killed there')
        files.check()
        unfinished = sorted(path.name for path in files.folder.glob('.*.tmp'))
        found = re.search(r'resumed epoch: \d+, iter: (\d+)', self._train(files.folder.name, files, '--resume'))
        files.torn += [f'left behind: {path.name}' for path in files.folder.glob('.*.tmp')]
        resumed_from = f'iter_{found[1]}' if found else None
        facts = dict(kind=point.kind, unfinished=unfinished, resumed_from=resumed_from, torn=files.torn)
        return facts | self._compare(files.folder)

    def _train(self, name: str, files: WholeFiles, *arguments: str) -> str:
        """Trains to the end and returns the output."""
        output = self.folder / f'{name}-{len(arguments)}.txt'
        with self._process(name, output, *arguments) as process:
            while process.is_alive():
                files.check()
                time.sleep(0.05)
        files.check()
        if process.exitcode:
            raise RuntimeError(f'{name} failed with exit code {process.exitcode}:\n{output.read_text()[-3000:]}')
        return output.read_text()

    def _kill(self, point: KillPoint, files: WholeFiles) -> bool:
        """Whether a run could be killed at ``point``, before its end."""
        output = self.folder / f'{files.folder.name}-killed.txt'
        with self._process(files.folder.name, output) as process:
            while process.is_alive() and not (output.exists() and point.said in output.read_text(errors='replace')):
                files.check()
                # What the run writes takes longer to prepare.
                time.sleep(10 * POLL_SECONDS)
            while process.is_alive():
                if point.writes is None:
                    time.sleep(point.delay)
                    process.kill()
                    process.join()
                elif any(files.folder.glob(point.writes)):
                    os.kill(process.pid, signal.SIGSTOP)
                    time.sleep(STOP_SECONDS)
                    in_the_middle = any(files.folder.glob(point.writes))
                    os.kill(process.pid, signal.SIGKILL if in_the_middle else signal.SIGCONT)
                    process.join(1 if in_the_middle else 0)
                time.sleep(POLL_SECONDS)
        return process.exitcode == -signal.SIGKILL

    @contextmanager
    def _process(self, name: str, output: Path, *arguments: str) -> Iterator[multiprocessing.Process]:
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
        files, facts = [], []
        for folder in (run, reference):
            checkpoint = read_checkpoint(folder / last)
            fused = read_checkpoint(folder / 'fused.pth')['state_dict']
            files.append([checkpoint['state_dict'], checkpoint['optimizer'], checkpoint.get('ema_state_dict'), fused])
            facts.append([(e.ap, e.recalibration, e.fusion) for e in read_report(folder / 'report.json')])
        return dict(
            largest_difference=largest_difference(*files),
            gamma=max(value.item() for key, value in files[0][0].items() if key.endswith('_gamma')),
            same_report=facts[0] == facts[1],
        )


def largest_difference(a: object, b: object) -> float:
    """Largest difference of two nested collections of tensors and numbers; infinite where they are not alike."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((largest_difference(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return max((largest_difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        return (a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max().item() if a.numel() else 0.0
    return 0.0 if not isinstance(a, torch.Tensor) and a == b else torch.inf


def random_points(count: int, max_iters: int, seed: int) -> list[KillPoint]:
    """Points of every kind in turn: the decay of gamma, a checkpoint, the recalibration, the fused checkpoint."""
    draw = random.Random(seed)
    points = []
    for i in range(count):
        iteration, step = draw.randint(1, max_iters // 2), 2 * draw.randint(1, max_iters // 2)
        delay = draw.uniform(0, 0.2)
        kinds = (
            KillPoint('decay', f'Iter(train) [{iteration:>{len(str(max_iters))}}/{max_iters}]', delay=delay),
            KillPoint('checkpoint', f'Saving checkpoint at {step} iterations', f'.iter_{step}.pth.0.tmp'),
            KillPoint('recalibration', f'Recalibration, pass {draw.randint(1, 3)}', delay=delay),
            KillPoint('fused checkpoint', 'Recalibration, pass 1', '.fused.pth.0.tmp'),
            KillPoint('recalibrated checkpoint', 'Recalibration, pass 1', f'.iter_{max_iters}.pth.0.tmp'),
        )
        points.append(kinds[i % len(kinds)])
    return points


def write_config(folder: Path, max_iters: int) -> Path:
    """The config of the run that is interrupted: the quick start's, small."""
    cfg = Config.fromfile(ROOT / 'configs' / 'quickstart_mask_rcnn_slab_swin.py')
    cfg.model.backbone.update(drop_path_rate=0.1)
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.generator = dict(num_train=60, num_val=4, size=(128, 96))
        loader.num_workers = 0
        loader.persistent_workers = False
    cfg.train_dataloader.batch_size = 2
    cfg.train_cfg.update(max_iters=max_iters, val_interval=max_iters // 2)
    # Keeping one is the hardest: mmengine alone removes it before it writes the next.
    cfg.default_hooks.checkpoint.update(interval=2, max_keep_ckpts=1, save_best='coco/bbox_mAP', rule='greater')
    cfg.default_hooks.logger.interval = 1
    cfg.custom_hooks[1].update(num_images=6, max_passes=3, tol=0.0)
    cfg.dump(folder / 'interrupted.py')
    return folder / 'interrupted.py'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--iters', type=int, default=8)
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/interruptions'), help='a new folder')
    args = parser.parse_args()
    folder = args.work_dir.resolve()
    folder.mkdir(parents=True)
    runs = Interruptions(write_config(folder, args.iters), folder)
    kills = []
    for point in random_points(args.kills, args.iters, args.seed):
        kills.append(runs.kill(point))
        print(json.dumps(kills[-1]), flush=True)
    summary = dict(
        kills=len(kills),
        equal_to_the_last_bit=sum(kill['largest_difference'] == 0 and kill['same_report'] for kill in kills),
        killed_in_the_middle_of_a_file=sum(bool(kill['unfinished']) for kill in kills),
        torn_files=sum(len(kill['torn']) for kill in kills),
    )
    result = dict(
        iterations=args.iters, seed=args.seed, environment=describe_environment(), summary=summary, runs=kills
    )
    path = ROOT / 'benchmarks' / 'results' / 'interruptions.json'
    path.write_text(json.dumps(result, indent=1) + '\n')
    print(f'{json.dumps(summary, indent=1)}\nWritten to {path}')


if __name__ == '__main__':
    main()
