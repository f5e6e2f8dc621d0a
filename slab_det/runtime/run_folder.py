"""Writes the files of a training run atomically, so that a run can be killed at any time and resumed."""

from __future__ import annotations

import copy
import errno
import glob
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import torch
from mmengine.config import Config
from mmengine.fileio import LocalBackend, register_backend
from mmengine.fileio.io import backend_instances
from mmengine.hooks import CheckpointHook
from mmengine.logging import MMLogger

from slab_det.runtime.config import to_values
from slab_det.runtime.errors import CheckpointError, ConfigError, config_errors, name_some

MARKER = 'last_checkpoint'


def install_run_folder() -> None:
    """Makes mmengine write local files atomically, and remove a checkpoint only after the next one is written.

    Replaces mmengine's ``LocalBackend``, whose ``put`` writes under the final name. Patches
    ``CheckpointHook._save_checkpoint_with_step`` and ``_save_best_checkpoint``, which remove the previous checkpoint
    first: a run with ``max_keep_ckpts=1`` that is killed while it saves would have no checkpoint left.
    """
    register_backend('local', AtomicLocalBackend, force=True, prefixes='')
    # mmengine caches backend instances.
    backend_instances.clear()
    for name in ('_save_checkpoint_with_step', '_save_best_checkpoint'):
        save = getattr(CheckpointHook, name)
        if not hasattr(save, '__wrapped__'):
            setattr(CheckpointHook, name, remove_after_saving(save))


def check_writable(*files: str | Path | None) -> None:
    """Raises OSError if one of ``files`` cannot be written; call it before long work. None means no file."""
    for path in (Path(file).resolve() for file in files if file is not None):
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())).close()
        except OSError as error:
            error.filename = str(path)
            raise


@contextmanager
def whole_file(file: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside ``file`` to write to, and renames it to ``file`` after the block.

    An error in the block leaves the previous ``file`` unchanged. Of several processes that write at once the last one
    wins. A killed program leaves the temporary file, whose name ends with ``.tmp``; the next write of ``file`` on the
    same machine removes it.

    Raises:
        OSError: With the name of the file that could not be written.
    """
    # Replaces the target of a symbolic link, not the link.
    path = Path(file).resolve()
    # Processes of two machines may have the same number, and share the folder.
    machine = f'.{path.name}.{crc32(platform.node().encode()):08x}'
    unfinished = path.with_name(f'{machine}-{os.getpid()}.tmp')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f'{glob.escape(machine)}-*.tmp'):
            if not _is_running(int(left.stem.rpartition('-')[2])):
                left.unlink(missing_ok=True)
        yield unfinished
        with open(unfinished, 'rb+') as stream:
            os.fsync(stream.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        # The error for a full disk has no file name.
        if error.filename in (None, str(unfinished)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        # An error of the block must not be hidden by one of the removal.
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Whether a process of this machine runs; on Windows, where a signal would end it, True."""
    try:
        if os.name == 'posix':
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It belongs to somebody else.
        pass
    return True


def _is_at(stream: IO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    return False


@contextmanager
def locked(file: str | Path) -> Iterator[None]:
    """Keeps other processes from changing ``file`` in the block, which reads it and writes what it has read and more.

    The lock is on ``.<name>.lock`` beside it, because :func:`whole_file` replaces the file itself. Where the file
    system has no locks, as some network file systems, a warning says so: of two writers one may lose its changes.
    """
    path = Path(file).resolve()
    lock = path.with_name(f'.{path.name}.lock')
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # NFS locks only files that are open for writing.
        with open(lock, 'a') as stream:
            try:
                import fcntl

                fcntl.flock(stream, fcntl.LOCK_EX)
            except (ImportError, OSError) as error:
                MMLogger.get_current_instance().warning(f'{path} cannot be locked ({error}): let one process write it')
            # The process that held the lock has removed the file; another one may have created it again.
            if not _is_at(stream, lock):
                continue
            try:
                yield
            finally:
                # Windows does not remove open files.
                with suppress(OSError):
                    lock.unlink()
            return


def save_with_config(checkpoint: dict, cfg: Config, path: str | Path) -> tuple[Path, Path]:
    """Writes a checkpoint and, beside it, ``<stem>_config.py``; returns both paths."""
    path, buffer, backend = Path(path), BytesIO(), AtomicLocalBackend()
    config = path.with_name(f'{path.stem}_config.py')
    # Save to memory first: torch.save into a file on a full disk raises an error without file name and cause.
    torch.save(checkpoint, buffer)
    # Write the config last: an old config refuses a new checkpoint, but a new config might accept an old one.
    backend.put(buffer.getvalue(), path)
    write_config(cfg, config)
    return path, config


def write_config(cfg: Config, path: str | Path) -> None:
    """Writes a config as Python, with :func:`~slab_det.runtime.config.to_values`, and reads it once.

    Raises:
        ConfigError: If the file does not read as what was written; it names the values.
    """
    written = Config(to_values(cfg), filename=cfg.filename)
    AtomicLocalBackend().put_text(written.pretty_text, path)
    with config_errors(f'{path}, as it was written'):
        read = Config.fromfile(path).to_dict()
    if lost := [key for key, value in written.to_dict().items() if read.get(key) != value]:
        raise ConfigError(f'{path}: the values of {name_some(lost)} are not read as they were: write plain values')


class AtomicLocalBackend(LocalBackend):
    """mmengine's LocalBackend, which writes with :func:`whole_file`."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Writes bytes to a file, and creates its folder if needed."""
        with whole_file(filepath) as name:
            name.write_bytes(obj)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Writes text to a file, and creates its folder if needed."""
        self.put(obj.encode(encoding), filepath)


def remove_after_saving(save: Callable) -> Callable:
    """Wraps a saving method of ``CheckpointHook``, so that it removes files only after saving."""

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
            # A resumed run may save a checkpoint under a name that it also removes.
            if path not in (self.last_ckpt, *best):
                backend.remove(path)

    return save_then_remove


def find_latest_checkpoint(folder: str | Path) -> str | None:
    """Returns the checkpoint to resume from in a work directory, or None if there is none yet.

    This is the checkpoint named in the file ``last_checkpoint``, even after the folder was moved. If that file or its
    checkpoint is missing, this is the newest ``iter_N.pth`` or ``epoch_N.pth``.

    Raises:
        CheckpointError: If there is a ``last_checkpoint``, but no checkpoint.
    """
    folder = Path(folder)
    marker = folder / MARKER
    name = marker.read_text().strip() if marker.is_file() else ''
    # Look in the folder first: it may be a copy of the folder that last_checkpoint names.
    for candidate in (folder / Path(name).name, Path(name)):
        if candidate.is_file():
            return str(candidate)
    saved = [file for file in folder.glob('*.pth') if re.fullmatch(r'(iter|epoch)_\d+\.pth', file.name)]
    if saved:
        return str(max(saved, key=lambda file: file.stat().st_mtime_ns))
    if marker.exists():
        raise CheckpointError(
            f'{marker} names {name or "nothing"}, which is not there, and {folder} has no other '
            f'checkpoint; give the checkpoint to resume from, or remove {MARKER} to start from the beginning'
        )
    return None
