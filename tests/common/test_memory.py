"""Freed memory is kept where glibc allows it and the user has not chosen otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from slab_det.common import memory

# Loads the file alone, without slab_det, which takes seconds. A block of 64 MB is freed: is it still resident?
PROGRAM = """
import importlib.util, sys, torch

spec = importlib.util.spec_from_file_location('memory', sys.argv[1])
memory = sys.modules['memory'] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

def stays():
    resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096 / 1e6
    before = resident()
    torch.ones(16 << 20)
    return resident() - before > 60

print(memory.keeps_freed_memory(), stays())
memory.keep_freed_memory()
print(memory.keeps_freed_memory(), stays())
"""
HAS_MALLOPT = hasattr(ctypes.CDLL(None), 'mallopt') and sys.platform == 'linux'


@pytest.mark.skipif(not HAS_MALLOPT, reason='only glibc has mallopt')
@pytest.mark.parametrize(
    ('variables', 'after'), [({}, 'True True'), (dict(MALLOC_MMAP_THRESHOLD_='131072'), 'False False')]
)
def test_a_freed_block_stays_unless_the_user_has_chosen(variables: dict, after: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith('MALLOC_')} | variables
    command = [sys.executable, '-c', PROGRAM, memory.__file__]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout.splitlines() == ['False False', after], found.stdout + found.stderr


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: None) -> None:
        raise TypeError('Windows has no library without a name')

    with monkeypatch.context() as windows:
        windows.setattr(memory.os, 'name', 'nt')
        windows.setattr(memory.ctypes, 'CDLL', refuse)
        memory.keep_freed_memory()
        memory.release_memory()
    monkeypatch.setattr(memory.ctypes, 'CDLL', lambda _: object())
    memory.keep_freed_memory()
    assert not memory._is_kept
