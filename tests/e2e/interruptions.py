"""Kills trainings with SIGKILL, resumes each with ``--resume``, and compares the end with an uninterrupted run's.

Every run is tools/train.py in a process of its own, forked from one that has imported torch. To kill a run while it
writes a file, the process is stopped first, and killed only if the unfinished file is still there. While a run lasts,
all files under their final names must be whole.
"""

import ast
import multiprocessing
import os
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

from slab_det.measure.report import read_report
from slab_det.runtime import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.0005
# A process stops within this time after SIGSTOP, unless it is inside a system call.
STOP_SECONDS = 0.02
FORK_SERVER = multiprocessing.get_context('forkserver')
TRAIN = str(ROOT / 'tools' / 'train.py')


@dataclass(frozen=True)
class KillPoint:
    """Where a run is killed: once it ``said`` a text, or after that while it ``writes`` a file (a glob)."""

    kind: str
    said: str
    writes: str | None = None


class WholeFiles:
    """Checks a work directory again and again: every file under its final name must be whole."""

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
