"""The files of a run: whole or absent, and none removed before its successor is there."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from io import BytesIO, StringIO
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import mmengine.config.config
import mmengine.hooks.checkpoint_hook
import torch
from mmengine.config import Config
from mmengine.fileio import LocalBackend, register_backend
from mmengine.fileio.io import backend_instances
from mmengine.hooks import CheckpointHook

from slab_det.runtime.errors import CheckpointError, SlabDetError

MARKER = 'last_checkpoint'


def install_run_folder() -> None:
    """Writes local files through :class:`AtomicLocalBackend`, and removes a checkpoint after its successor is written.

    Mends three behaviours. ``LocalBackend.put`` writes under the final name. ``Config.dump`` and ``CheckpointHook``
    write the config and ``last_checkpoint`` with ``open``, under the final name too.
    ``CheckpointHook._save_checkpoint_with_step`` and ``_save_best_checkpoint`` remove the previous checkpoint first: a
    run with ``max_keep_ckpts=1`` that is killed or out of disk space while it saves has no checkpoint left.
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/fileio/backends/local_backend.py
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/config/config.py
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/hooks/checkpoint_hook.py
    """
    register_backend('local', AtomicLocalBackend, force=True, prefixes='')
    # The backends that mmengine has made so far, for reuse.
    backend_instances.clear()
    # A module's own name comes before the builtin one.
    mmengine.config.config.open = mmengine.hooks.checkpoint_hook.open = open_atomically
    for name in ('_save_checkpoint_with_step', '_save_best_checkpoint'):
        save = getattr(CheckpointHook, name)
        if not hasattr(save, '__wrapped__'):
            setattr(CheckpointHook, name, remove_after_saving(save))


def check_writable(*files: str | Path | None) -> None:
    """Raises the OSError now that writing ``files`` would raise after the work; None stands for no file."""
    for path in (Path(os.path.realpath(file)) for file in files if file is not None):
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.is_file() or not path.exists():
                tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())).close()
        except OSError as error:
            error.filename = str(path)
            raise


@contextmanager
def whole_files(*files: str | Path) -> Iterator[list[Path]]:
    """Gives the names under which to write ``files``, beside them; they appear together, when the block is done.

    A file appears when all of it is on the disk, in the order of ``files``. A program that is killed, or has no space,
    or raises in the block because a check fails, leaves the previous files as they were, and beside them at most those
    whose names end with ``.tmp``.

    Raises:
        OSError: With the name of the file that could not be written.
    """
    # A link keeps pointing to its file, whose content changes.
    paths = [Path(os.path.realpath(file)) for file in files]
    # Renaming would replace a device: for root, that of the whole machine.
    is_device = [path.exists() and not path.is_file() for path in paths]
    names = [
        path if device else path.with_name(f'.{path.name}.{uuid4().hex[:8]}.tmp')
        for path, device in zip(paths, is_device, strict=True)
    ]
    written = [(name, path) for name, path in zip(names, paths, strict=True) if name != path]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield names
        for name, _ in written:
            with open(name, 'rb+') as file:
                os.fsync(file.fileno())
        for name, path in written:
            os.replace(name, path)
    except OSError as error:
        # A full disk does not say which file it was: the last one that was begun.
        begun = [(name, path) for name, path in written if error.filename == str(name)] or [
            (name, path) for name, path in written if error.filename is None and name.exists()
        ]
        if begun:
            error.filename, error.filename2 = str(begun[-1][1]), None
        raise
    finally:
        for name, _ in written:
            name.unlink(missing_ok=True)


def save_with_config(checkpoint: dict, cfg: Config, path: str | Path) -> tuple[Path, Path]:
    """Writes a checkpoint and, beside it, ``<stem>_config.py``; returns the names of both."""
    path, buffer = Path(path), BytesIO()
    files = path, path.with_name(f'{path.stem}_config.py')
    # PyTorch itself would raise errors of its own where the disk is full.
    torch.save(checkpoint, buffer)
    # An old config refuses a new checkpoint; a new config might take an old one.
    with whole_files(*files) as (weights, config):
        weights.write_bytes(buffer.getbuffer())
        config.write_text(cfg.pretty_text, encoding='utf-8')
    return files


class AtomicLocalBackend(LocalBackend):
    """mmengine's local files, written as :func:`whole_files`."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Writes bytes to a file and makes its folder if it has none."""
        with whole_files(filepath) as (name,):
            name.write_bytes(obj)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Writes text to a file and makes its folder if it has none."""
        self.put(obj.encode(encoding), filepath)


@contextmanager
def open_atomically(file: str | Path, mode: str = 'r', encoding: str = 'utf-8') -> Iterator[IO]:
    """``open``, but a text that is written appears under its name when all of it is on the disk."""
    if mode != 'w':
        with open(file, mode, encoding=encoding) as stream:
            yield stream
        return
    text = StringIO()
    yield text
    AtomicLocalBackend().put_text(text.getvalue(), file, encoding)


def remove_after_saving(save: Callable) -> Callable:
    """A method of ``CheckpointHook`` that saves, with its removals moved behind the saving."""

    @wraps(save)
    def save_then_remove(self: CheckpointHook, *args: Any, **kwargs: Any) -> None:
        backend, removals = self.file_backend, []
        self.file_backend = copy.copy(backend)
        self.file_backend.remove = removals.append
        try:
            save(self, *args, **kwargs)
        finally:
            self.file_backend = backend
        best = [getattr(self, 'best_ckpt_path', None), *getattr(self, 'best_ckpt_path_dict', {}).values()]
        for path in removals:
            # A resumed run saves under the same name what it removes.
            if path not in (self.last_ckpt, *best):
                backend.remove(path)

    return save_then_remove


def find_latest_checkpoint(folder: str | Path) -> str | None:
    """The checkpoint to resume from in a work directory, None if there is none yet.

    The file ``last_checkpoint`` names it, also after the folder was moved. Where a run was killed before all of that
    name was written, the newest ``iter_N.pth`` or ``epoch_N.pth`` is taken.

    Raises:
        CheckpointError: If ``last_checkpoint`` is there, but no checkpoint.
    """
    folder = Path(folder)
    marker = folder / MARKER
    name = marker.read_text().strip() if marker.is_file() else ''
    # In the folder first: of a copied folder, the original may have gone on.
    for candidate in (folder / Path(name).name, Path(name)):
        if candidate.is_file():
            return str(candidate)
    saved = [file for file in folder.glob('*.pth') if re.fullmatch(r'(iter|epoch)_\d+\.pth', file.name)]
    if saved:
        return str(max(saved, key=lambda file: file.stat().st_mtime_ns))
    if marker.exists():
        raise CheckpointError(
            f'{marker} names {name or "nothing"}, which is not there, and {folder} has no other '
            f'checkpoint; name the one to resume from, or remove {MARKER} to start anew'
        )
    return None


def lock_run_folder(folder: str | Path) -> None:
    """Keeps ``folder`` for this process until it ends, however it ends; its file ``.lock`` stays behind, free.

    Raises:
        SlabDetError: If another process keeps it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Never closed. A lock of lockf, unlike one of flock, is not shared with the workers of data loaders, which outlive
    # a killed run for some seconds.
    descriptor = os.open(Path(folder) / '.lock', os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # With any other number, the file system has no locks.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise SlabDetError(
                f'{folder} is the folder of a training that is going on, and two would overwrite each other; wait for '
                'its end, or give another --work-dir'
            ) from error


def remove_unfinished_files(folder: str | Path) -> None:
    """Removes the files that a killed run was writing in ``folder``."""
    for file in Path(folder).glob('.*.tmp'):
        if re.fullmatch(r'\..+\.[0-9a-f]{8}\.tmp', file.name):
            file.unlink(missing_ok=True)
