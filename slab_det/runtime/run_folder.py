"""mmengine's work directory: whole files only, nothing removed before its successor is there, the latest found."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import mmengine.runner
import mmengine.runner._flexible_runner
import mmengine.runner.checkpoint
import mmengine.runner.runner
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.fileio import join_path, put_text
from mmengine.hooks import CheckpointHook
from mmengine.runner import Runner

from slab_det.runtime.errors import CheckpointError

MARKER = 'last_checkpoint'


def install_run_folder() -> None:
    """Replaces what mmengine does with the files of a run, for every runner and every CheckpointHook."""
    for module in (
        mmengine.runner,
        mmengine.runner.checkpoint,
        mmengine.runner.runner,
        mmengine.runner._flexible_runner,
    ):
        module.find_latest_checkpoint = find_latest_checkpoint
    CheckpointHook._save_checkpoint_with_step = save_then_remove
    for owner, name, changed in (
        (CheckpointHook, '_save_best_checkpoint', removing_last),
        (CheckpointHook, 'before_train', removing_leftovers),
        (Config, 'dump', dumping_whole_files),
    ):
        if not hasattr(getattr(owner, name), '__wrapped__'):
            setattr(owner, name, changed(getattr(owner, name)))


def find_latest_checkpoint(path: str) -> str | None:
    """The checkpoint to resume from in a work directory, None if there is none yet.

    It is what ``last_checkpoint`` names, also after the folder was moved or from another current directory; and the
    newest ``iter_N.pth`` or ``epoch_N.pth`` where a run was killed just before it wrote that name.

    Raises:
        CheckpointError: If ``last_checkpoint`` is there, but no checkpoint.
    """
    folder = Path(path)
    marker = folder / MARKER
    named = marker.read_text().strip() if marker.is_file() else ''
    if '://' in named:
        return named
    # In the folder first: of a copied folder, the original may have gone on.
    for candidate in (folder / Path(named).name, Path(named)) if named else ():
        if candidate.exists():
            return str(candidate)
    saved = [file for file in folder.glob('*.pth') if re.fullmatch(r'(iter|epoch)_\d+\.pth', file.name)]
    if saved:
        return str(max(saved, key=lambda file: file.stat().st_mtime_ns))
    if marker.exists():
        raise CheckpointError(
            f'{marker} names {named or "nothing"}, which is not there, and {path} has no other '
            f'checkpoint; name the one to resume from, or remove {MARKER} to start anew'
        )
    return None


def save_then_remove(self: CheckpointHook, runner: Runner, step: int, meta: dict) -> None:
    """``CheckpointHook._save_checkpoint_with_step``, but the checkpoint that is too many goes last.

    mmengine removes it first: killed or out of disk space a moment later, a run with ``max_keep_ckpts=1`` has none.
    """
    outdated = None
    if self.max_keep_ckpts > 0 and step not in list(self.keep_ckpt_ids)[-1:]:
        if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
            outdated = self.keep_ckpt_ids.popleft()
        self.keep_ckpt_ids.append(step)
        # The checkpoint must know it: a resumed run goes on removing from there.
        runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
    name = self.filename_tmpl.format(step)
    self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
    runner.message_hub.update_info('last_ckpt', self.last_ckpt)
    runner.save_checkpoint(
        self.out_dir,
        name,
        self.file_client_args,
        save_optimizer=self.save_optimizer,
        save_param_scheduler=self.save_param_scheduler,
        meta=meta,
        by_epoch=self.by_epoch,
        backend_args=self.backend_args,
        **self.args,
    )
    if is_main_process():
        put_text(self.last_ckpt, join_path(runner.work_dir, MARKER))
        if outdated is not None:
            _remove(self.file_backend, self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(outdated)))


def removing_last(save_best: Callable) -> Callable:
    """``CheckpointHook._save_best_checkpoint``, but the previous best checkpoint goes when the new one is there."""

    @wraps(save_best)
    def save_best_then_remove(self: CheckpointHook, runner: Runner, metrics: dict) -> None:
        backend = self.file_backend
        self.file_backend = notes = _NotesRemovals(backend)
        try:
            save_best(self, runner, metrics)
        finally:
            self.file_backend = backend
        best = {getattr(self, 'best_ckpt_path', None), *getattr(self, 'best_ckpt_path_dict', {}).values()}
        for path in notes.outdated:
            if path not in best:
                _remove(backend, path)

    return save_best_then_remove


def removing_leftovers(before_train: Callable) -> Callable:
    """``CheckpointHook.before_train``, but it also removes what a killed run was writing."""

    @wraps(before_train)
    def remove_leftovers_before_train(self: CheckpointHook, runner: Runner) -> None:
        before_train(self, runner)
        if is_main_process():
            for folder in {self.out_dir, runner.work_dir}:
                for file in Path(folder).glob('.*.tmp'):
                    if re.fullmatch(r'\..+\.[0-9a-f]{8}\.tmp', file.name):
                        file.unlink(missing_ok=True)

    return remove_leftovers_before_train


def dumping_whole_files(dump: Callable) -> Callable:
    """``Config.dump``, but a .py file appears when all of it is on the disk, as the others do."""

    @wraps(dump)
    def dump_whole(self: Config, file: str | Path | None = None) -> str | None:
        if file is None or not str(file).endswith('.py'):
            return dump(self, file)
        put_text(self.pretty_text, os.fspath(file))
        return None

    return dump_whole


class _NotesRemovals:
    """A file backend that only notes what it is asked to remove."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.outdated: list[str] = []

    def remove(self, path: str) -> None:
        self.outdated.append(path)

    rmtree = remove

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _remove(backend: Any, path: str) -> None:
    # DeepSpeed's checkpoints are folders.
    if backend.isfile(path):
        backend.remove(path)
    elif backend.isdir(path):
        backend.rmtree(path)
