"""Keeps or returns freed memory, and measures how much memory a block takes."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

# Options of glibc's mallopt: how much freed memory stays at the top of the heap, and how many blocks have pages of
# their own, which go back to the system at once.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
# glibc reads these when a program starts: what a user has chosen stays.
_VARIABLES = ('MALLOC_MMAP_MAX_', 'MALLOC_MMAP_THRESHOLD_', 'MALLOC_TRIM_THRESHOLD_', 'GLIBC_TUNABLES')
_is_kept = False


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that this process frees, for the next allocation; elsewhere nothing changes.

    By default glibc gives large blocks back, so that each layer of a detector waits for fresh pages. The process then
    stays as large as it was at most. A user who sets one of glibc's variables, such as ``MALLOC_TRIM_THRESHOLD_``, has
    chosen, and nothing changes.
    """
    global _is_kept
    option = _c_function('mallopt')
    if option is not None and not any(name in os.environ for name in _VARIABLES):
        _is_kept = bool(option(_MMAP_MAX, 0) and option(_TRIM_THRESHOLD, -1))


def _c_function(name: str) -> Callable | None:
    """A function of the C library that this process runs on; None where it has no such function."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == 'posix' else None


def keeps_freed_memory() -> bool:
    """Whether glibc keeps the memory that this process frees."""
    return _is_kept or {'MALLOC_MMAP_MAX_', 'MALLOC_TRIM_THRESHOLD_'} <= os.environ.keys()


def release_memory() -> None:
    """Returns freed memory to the system: glibc keeps as much as is in use, in pieces that fit no later step."""
    if trim := _c_function('malloc_trim'):
        trim(0)


def available_memory() -> int | None:
    """The bytes of memory that this process, in its container, can still take; None where the system does not tell."""
    try:
        free = _kilobytes(Path('/proc/meminfo'), 'MemAvailable') * 1024
    except OSError:
        return None
    group = Path('/sys/fs/cgroup')
    with suppress(OSError, ValueError):  # no container, or no limit: 'max'
        free = min(free, int((group / 'memory.max').read_text()) - int((group / 'memory.current').read_text()))
    return max(0, free)


@dataclass
class MemoryGrowth:
    """How much memory grew at most in a block; ``megabytes`` is None where the system does not tell."""

    megabytes: float | None = None


@contextmanager
def memory_growth(device: str) -> Iterator[MemoryGrowth]:
    """Measures by how much memory grows at most in the block, in megabytes.

    Args:
        device: 'cuda' for the memory of the GPU that PyTorch allocates, 'cpu' for the memory of this process (Linux).
    """
    growth = MemoryGrowth()
    gc.collect()
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield growth
        growth.megabytes = (torch.cuda.max_memory_allocated() - before) / 1e6
        return
    # The block would use freed memory again.
    release_memory()
    status, clear = Path('/proc/self/status'), Path('/proc/self/clear_refs')
    try:
        # Linux: sets the peak to the present size.
        clear.write_text('5')
        before = _kilobytes(status, 'VmRSS')
    except OSError:
        yield growth
        return
    yield growth
    growth.megabytes = (_kilobytes(status, 'VmHWM') - before) * 1024 / 1e6


def _kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f'{name}:'))
