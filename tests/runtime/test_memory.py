"""Freed memory is kept where glibc allows it and the user has not chosen otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

# A block of 64 MB is freed; what is left of it is resident.
PROGRAM = """
from slab_det.runtime.memory import keep_freed_memory, keeps_freed_memory
import sys, torch

def resident():
    return int(open('/proc/self/statm').read().split()[1]) * 4096 / 1e6

if 'keep' in sys.argv:
    keep_freed_memory()
before = resident()
block = torch.ones(16 << 20)
del block
print(keeps_freed_memory(), resident() - before > 60)
"""
HAS_MALLOPT = hasattr(ctypes.CDLL(None), 'mallopt') and sys.platform == 'linux'


@pytest.mark.skipif(not HAS_MALLOPT, reason='only glibc has mallopt')
@pytest.mark.parametrize(
    ('arguments', 'variables', 'expected'),
    [
        ((), {}, 'False False'),
        (('keep',), {}, 'True True'),
        (('keep',), dict(MALLOC_MMAP_THRESHOLD_='131072'), 'False False'),
    ],
    ids=['default', 'kept', 'chosen by the user'],
)
def test_a_freed_block_stays(arguments, variables, expected) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith('MALLOC_')} | variables
    found = subprocess.run([sys.executable, '-c', PROGRAM, *arguments], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == expected, found.stderr


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from slab_det.runtime import memory

    monkeypatch.setattr(memory, '_is_kept', False)
    monkeypatch.setattr(memory.ctypes, 'CDLL', lambda _: object())
    memory.keep_freed_memory()
    assert not memory._is_kept
