"""Writes files whole, or not at all, and locks them against other writers."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from zlib import crc32

from mmengine.logging import MMLogger

# Numbers the writes of this process: several threads may write one file.
_writes = itertools.count()


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

    An error in the block leaves the previous ``file`` unchanged. If several threads or processes write at once, the
    file is the last one's. A killed program leaves the temporary file, whose name ends with ``.tmp``; the next write of
    ``file`` on the same machine removes it.

    Raises:
        OSError: With the name of the file that could not be written.
    """
    # Replaces the target of a symbolic link, not the link.
    path = Path(file).resolve()
    # Processes of two machines may have the same number, and share the folder.
    machine = f'.{path.name}.{crc32(platform.node().encode()):08x}'
    unfinished = path.with_name(f'{machine}-{os.getpid()}-{next(_writes)}.tmp')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f'{glob.escape(machine)}-*.tmp'):
            if not _is_running(int(left.stem[len(machine) + 1 :].partition('-')[0])):
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
def locked(file: str | Path, wait: bool = True) -> Iterator[None]:
    """Holds a lock on ``file`` during the block, so that the block can read the file, add to it and write it.

    The lock is on ``.<name>.lock`` beside it, because :func:`whole_file` replaces the file itself. Where the file
    system has no locks, as some network file systems, a warning says so: of two writers one may lose its changes.

    Args:
        file: The file, or a folder; it need not exist.
        wait: Wait for the lock.

    Raises:
        BlockingIOError: If somebody else holds the lock, without ``wait``.
    """
    path = Path(file).resolve()
    lock = path.with_name(f'.{path.name}.lock')
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # NFS locks only files that are open for writing.
        with open(lock, 'a') as stream:
            try:
                import fcntl

                fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
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
