"""One process at a time in a folder, whatever dies when."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLAIM = 'claim'


@contextmanager
def claimed(folder: Path) -> Iterator[int | None]:
    """Claims a folder; yields None if it is another process's.

    The claim is a lock of the operating system on the file ``claim``, which says whose it is: there is no moment in
    which two have it, and none is left behind by a process that died. A child that inherits the descriptor that is
    yielded (``pass_fds``) holds the claim too: a training that outlives its driver stays alone in its folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / CLAIM, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f'{os.getpid()}\n'.encode())
        yield descriptor
    finally:
        # Not unlocked: a child that still runs keeps it.
        os.close(descriptor)


def holder(folder: Path) -> str:
    """The process that claimed the folder last."""
    return (folder / CLAIM).read_text().strip() or 'unknown'
