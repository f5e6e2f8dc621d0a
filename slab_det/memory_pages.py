"""Memory that a process asks the system for, page by page, while it computes: a cost that no operator shows."""

from __future__ import annotations

import ctypes
import sys

from slab_det.errors import LatencyError

# glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next allocation, from now on and in the whole process.

    By default it gives large blocks back to the system, and each layer gets fresh pages, which are zeroed as they are
    first touched. How many depends on what else was allocated before, so that two like models may differ by it.
    Allocators made for servers (jemalloc, tcmalloc) keep most of it.

    Raises:
        LatencyError: Where the C library is not glibc.
    """
    mallopt = None if sys.platform == 'win32' else getattr(ctypes.CDLL(None), 'mallopt', None)
    # All blocks come from the heap, and its end is never cut off.
    if mallopt is None or not (mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1)):
        raise LatencyError('only glibc can be told to keep freed memory; leave out keep_memory (--keep-memory)')


def count_page_faults() -> int:
    """How many pages the system has handed to this process so far, without reading them from a disk; 0 on Windows."""
    if sys.platform == 'win32':
        return 0
    import resource  # Only there.

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
