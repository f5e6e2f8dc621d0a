"""Memory that a process asks the system for, page by page, while it computes: a cost that no operator shows."""

from __future__ import annotations

import ctypes
import os
import sys

from slab_det.runtime.errors import LatencyError

# glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_keeps = False


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next allocation, from now on and in the whole process.

    By default it gives large blocks back to the system, and each layer gets fresh pages, which are zeroed as they are
    first touched. How many depends on what else was allocated before, so that two like models may differ by it.
    Allocators made for servers (jemalloc, tcmalloc) keep most of it. In threads other than the first, glibc gives
    blocks back that are larger than the heap of a thread, 64 MiB, whatever it was told.

    Raises:
        LatencyError: Where the C library is not glibc.
    """
    global _keeps
    mallopt = None if sys.platform == 'win32' else getattr(ctypes.CDLL(None), 'mallopt', None)
    # All blocks come from the heap, and its end is never cut off.
    if mallopt is None or not (mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1)):
        raise LatencyError('only glibc can be told to keep freed memory; leave out keep_memory (--keep-memory)')
    _keeps = True


def keeps_freed_memory() -> bool:
    """Whether this process was told to, by :func:`keep_freed_memory` or by glibc's variables as it started."""
    return _keeps or (os.environ.get('MALLOC_MMAP_MAX_') == '0' and 'MALLOC_TRIM_THRESHOLD_' in os.environ)


def count_page_faults() -> int:
    """How many pages the system has handed to this process so far, without reading them from a disk; 0 on Windows."""
    if sys.platform == 'win32':
        return 0
    import resource  # Only there.

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
