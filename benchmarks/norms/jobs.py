"""What a study is made of: a training with one seed, or an evaluation of one, each in a folder of its own."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path

from mmengine.config import Config
from mmengine.fileio import put_text
from mmengine.runner import find_latest_checkpoint

from benchmarks.experiments import ROOT, announce, tool

from .claim import claimed, holder
from .studies import Base, Recalibration, Run, Study

# A name of its own: a test puts processes in its place that need not import torch.
start = subprocess.Popen
TRAINED = 'trained.pth'
# How a run is logged, saved and drawn, and what it imports: none of it changes its result.
UNDECIDING = ('custom_imports', 'default_hooks', 'env_cfg', 'log_level', 'log_processor', 'vis_backends', 'visualizer')
RECALIBRATION_HOOK = 'RecalibrateFuseHook'


@dataclass(frozen=True)
class Done:
    """The end of a job, as in its file ``done``.

    Attributes:
        status: 'finished' or 'failed'.
        config: Hash of the merged config.
        seconds: How long the last attempt took.
        jobs: How many jobs of the driver ran at a time.
        error: The last line of the output, where it failed.
    """

    status: str
    config: str
    seconds: float
    jobs: int
    error: str = ''


class Job(ABC):
    """Commands to be run in a folder, until one has ended well there."""

    def __init__(self, base: Base, name: str, seed: int, folder: Path, data_root: str) -> None:
        self.base, self.name, self.seed, self.folder, self.data_root = base, name, seed, folder, data_root
        self._process: subprocess.Popen | None = None
        self._stopped = False

    def __str__(self) -> str:
        return f'{self.base.name}/{self.name} seed {self.seed}'

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """What results of this job depend on, besides code and data."""

    @abstractmethod
    def commands(self) -> Iterator[list[str]]:
        """The commands, each asked for when those before it have ended well."""

    def obstacle(self) -> str | None:
        """Why the job must not be run, nor its results be used."""
        done = self.done
        if done is not None and done.config != self.fingerprint:
            return f'was run with another config; remove {self.folder} to run it anew'
        return None

    @property
    def done(self) -> Done | None:
        """How the job ended; None before."""
        file = self.folder / 'done'
        return Done(**json.loads(file.read_text())) if file.exists() else None

    def run(self, jobs: int) -> Done | str:
        """Runs the commands, unless another process does.

        Args:
            jobs: So many run at a time; with more than one, each has one thread.

        Returns:
            How it ended, or why it did not end.
        """
        with claimed(self.folder) as descriptor:
            if descriptor is None:
                return f'belongs to process {holder(self.folder)} or to a training that it started'
            # Another driver may have been faster.
            if self.done is not None:
                return self.done
            began = time.monotonic()
            for command in self.commands():
                code = self._call(command, descriptor, jobs)
                if code < 0:
                    return f'was ended by signal {-code}; start the study again to go on'
                if code > 0:
                    return self._finish('failed', began, jobs, last_line(self.output))
            return self._finish('finished', began, jobs)

    def stop(self) -> None:
        """Ends the command that is running, if one is, and starts none after it."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    @property
    def output(self) -> Path:
        """What the commands print."""
        return self.folder / 'output.txt'

    def _call(self, command: list[str], descriptor: int, jobs: int) -> int:
        if self._stopped:
            return -signal.SIGTERM
        announce(command)
        environment = {
            **os.environ,
            'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')])),
        }
        if jobs > 1:
            environment['OMP_NUM_THREADS'] = '1'
        with self.output.open('a') as output:
            self._process = start(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, pass_fds=[descriptor]
            )
            if self._stopped:
                self._process.terminate()
            return self._process.wait()

    def _finish(self, status: str, began: float, jobs: int, error: str = '') -> Done:
        # It goes into tables: no paths of this machine.
        error = error.replace(f'{self.folder}/', '').replace(f'{ROOT}/', '')
        done = Done(status, self.fingerprint, round(time.monotonic() - began, 1), jobs, error)
        put_text(json.dumps(asdict(done)) + '\n', str(self.folder / 'done'))
        return done


class Training(Job):
    """A run with one seed."""

    def __init__(self, base: Base, run: Run, seed: int, root: Path, data_root: str) -> None:
        super().__init__(base, run.name, seed, root / base.name / run.name / f'seed{seed}', data_root)
        self.definition = run

    @cached_property
    def config(self) -> Config:
        """The base config with the changes of base, run and seed."""
        config = copy.deepcopy(base_config(self.base.config))
        for changes in (self.base.changes, *self.definition.changes, dict(randomness=dict(seed=self.seed))):
            config.merge_from_dict(changes)
        return config

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.config)

    @property
    def config_file(self) -> Path:
        # Not in the folder itself, where the runner leaves a copy of it with the options of the command line.
        return self.folder / 'merged' / 'config.py'

    def obstacle(self) -> str | None:
        done = self.done
        if not self.config_file.exists() or (done is None and find_latest_checkpoint(str(self.folder)) is None):
            return None
        if done is not None and done.config == self.fingerprint:
            return None
        old = Config.fromfile(self.config_file)
        if done is None and fingerprint(old) == self.fingerprint:
            return None
        different = ', '.join(different_keys(deciding(old), deciding(self.config))) or 'a version of this driver'
        return f'was trained with another config ({different}); remove {self.folder} to train it anew'

    def commands(self) -> Iterator[list[str]]:
        self.config.dump(self.config_file)
        if self.definition.keep_trained and not (self.folder / TRAINED).exists():
            unfinished = self.config.copy()
            unfinished.custom_hooks = [hook for hook in unfinished.custom_hooks if hook['type'] != RECALIBRATION_HOOK]
            unfinished.dump(self.config_file.with_name('without_recalibration.py'))
            yield self._train('without_recalibration.py')
            # The hook writes the recalibrated checkpoint in its place.
            kept = self.folder / f'{TRAINED}.tmp'
            shutil.copyfile(find_latest_checkpoint(str(self.folder)), kept)
            kept.rename(self.folder / TRAINED)
        # After the last iteration, resuming is recalibrating and fusing.
        yield self._train('config.py')

    def _train(self, config: str) -> list[str]:
        return tool(
            'train.py',
            self.config_file.with_name(config),
            '--work-dir',
            self.folder,
            '--data-root',
            self.data_root,
            '--resume',
        )


class Evaluation(Job):
    """A trained run with recalibrated statistics, evaluated."""

    def __init__(self, training: Training, recalibration: Recalibration) -> None:
        super().__init__(
            training.base,
            recalibration.name,
            training.seed,
            training.folder / f'recalibrated_{recalibration.how}',
            training.data_root,
        )
        self.training, self.recalibration = training, recalibration

    @property
    def fingerprint(self) -> str:
        return f'{self.training.fingerprint}@{self.recalibration.how}'

    def obstacle(self) -> str | None:
        if self._checkpoint() is None:
            return f'waits for {self.training}'
        return super().obstacle() or self.training.obstacle()

    @property
    def starts_as_trained(self) -> bool:
        """Whether the checkpoint from before the recalibration of the training was kept."""
        return (self.training.folder / TRAINED).exists()

    def _checkpoint(self) -> Path | None:
        """What to start from; None as long as there is none."""
        folder, done = self.training.folder, self.training.done
        if self.starts_as_trained:
            return folder / TRAINED
        # Which statistics a recalibration replaces does not matter.
        if self.recalibration.num_images and done is not None and done.status == 'finished':
            return Path(find_latest_checkpoint(str(folder)))
        return None

    def commands(self) -> Iterator[list[str]]:
        config, checkpoint = self.training.config_file, self._checkpoint()
        if self.recalibration.num_images:
            target = self.folder / 'recalibrated.pth'
            passes = ['--max-passes', self.recalibration.passes] if self.recalibration.passes else []
            yield tool(
                'recalibrate.py',
                config,
                checkpoint,
                '--out',
                target,
                *passes,
                '--data-root',
                self.data_root,
                '--num-images',
                self.recalibration.num_images,
                '--pipeline',
                self.recalibration.pipeline,
                '--json',
                self.folder / 'recalibration.json',
            )
            checkpoint = target
        yield tool('test.py', config, checkpoint, '--work-dir', self.folder, '--data-root', self.data_root)


def jobs_of(study: Study, seeds: list[int], root: Path, data_root: str) -> list[Job]:
    """All jobs of a study: seed by seed, so that a table with one seed is complete early."""
    jobs = []
    for seed in seeds:
        trainings = {run.name: Training(study.base, run, seed, root, data_root) for run in study.runs}
        jobs += trainings.values()
        jobs += [Evaluation(trainings[r.run.name], r) for r in study.recalibrations]
    return jobs


@cache
def base_config(path: Path) -> Config:
    """A config of benchmarks/, read once: finding mmdet's own in its ``_base_`` takes seconds."""
    return Config.fromfile(ROOT / path)


def deciding(config: Config) -> dict:
    """What of a config decides the result of a run: all but how it is logged, saved and drawn."""
    return {key: value for key, value in config.to_dict().items() if key not in UNDECIDING}


def fingerprint(config: Config) -> str:
    """A short hash of what decides the result of a run."""
    return hashlib.sha256(json.dumps(deciding(config), sort_keys=True, default=str).encode()).hexdigest()[:12]


def different_keys(old: dict, new: dict, prefix: str = '') -> list[str]:
    """The dotted names of what differs between two nested dicts."""
    names = []
    for key in sorted({*old, *new}, key=str):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += different_keys(a, b, f'{prefix}{key}.')
        elif json.dumps(a, sort_keys=True, default=str) != json.dumps(b, sort_keys=True, default=str):
            names.append(f'{prefix}{key}')
    return names


def last_line(output: Path) -> str:
    """The last line, which names the error; of a traceback also what was logged last, which may say more."""
    lines = [line.strip() for line in output.read_text(errors='replace').splitlines() if line.strip()]
    logged = [found[1] for line in lines if (found := re.search(r' - mmengine - \w+ - (.+)', line))]
    # What our tools say themselves needs no explanation.
    return '; last logged: '.join([*lines[-1:], *(() if lines and lines[-1].startswith('error: ') else logged[-1:])])
