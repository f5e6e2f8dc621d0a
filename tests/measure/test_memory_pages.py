"""Fresh pages of memory in latency measurements: counted, said, and avoided on request."""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from torch import nn

from slab_det.measure import memory_pages
from slab_det.measure.latency import describe_scope, latency_table, measure_latency
from slab_det.measure.memory_pages import keep_freed_memory
from slab_det.runtime.errors import LatencyError

QUICK = {'size': (32, 32), 'rounds': 3, 'warmup': 1, 'scope': 'backbone'}
# In a process of its own: what it asks of the allocator cannot be taken back. Of blocks larger than 32 MiB glibc gives
# every one back to the system by default.
SCRIPT = """
import json
import torch
from slab_det import measure_latency
from slab_det.runtime.errors import LatencyError

class Spender(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x):
        return torch.ones(48 * 2**18)

for keep_memory, dtype in ((False, torch.float32), (True, torch.float64), (False, torch.float32),
                           (True, torch.float32), (False, torch.float32)):
    try:
        result = measure_latency({'a': Spender(dtype)}, (32, 32), 5, scope='backbone', keep_memory=keep_memory)['a']
        print(json.dumps([result.kept_memory, result.page_faults]))
    except LatencyError:
        print('"refused"')
"""


@pytest.fixture(autouse=True)
def nothing_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: another test may have asked, which cannot be taken back."""
    monkeypatch.setattr(memory_pages, '_keeps', False)
    monkeypatch.delenv('MALLOC_MMAP_MAX_', raising=False)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'mallopt'), reason='the C library is not glibc')
def test_kept_memory_needs_no_fresh_pages() -> None:
    done = subprocess.run([sys.executable, '-c', SCRIPT], capture_output=True, text=True, check=True)
    default, refused, after_refusal, asked_for, afterwards = map(json.loads, done.stdout.splitlines()[-5:])
    # A call that measures nothing changes nothing; one that does cannot be taken back.
    assert refused == 'refused'
    for kept, pages in (default, after_refusal):
        # 48 MiB in pages of 4 KiB, or in fewer, larger ones.
        assert not kept and 48 / 2 <= pages <= 1.1 * 48 * 256
    for kept, pages in (asked_for, afterwards):
        assert kept and pages < 10


def test_variables_of_glibc_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not measure_latency({'a': nn.Identity()}, **QUICK)['a'].kept_memory
    monkeypatch.setenv('MALLOC_MMAP_MAX_', '0')
    monkeypatch.setenv('MALLOC_TRIM_THRESHOLD_', '16000000000')
    assert measure_latency({'a': nn.Identity()}, **QUICK)['a'].kept_memory


def test_table_says_how_many_pages_and_what_leaves_them_out() -> None:
    result = measure_latency({'a': nn.Identity()}, **QUICK)['a']
    spent = replace(result, name='b', page_faults=8128)
    assert 'fresh pages' not in latency_table([replace(result, page_faults=0)])
    printed = latency_table([replace(result, page_faults=0), spent])
    assert 'fresh pages of memory per round: a 0, b 8128; --keep-memory measures without' in printed
    kept = replace(result, kept_memory=True, page_faults=3)
    assert 'per round: a 3\n' in f'{latency_table([kept])}\n'
    assert 'freed memory kept' in describe_scope(kept.to_dict())
    with pytest.raises(LatencyError, match='kept memory False and True'):
        latency_table([result, kept])


def test_other_c_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, 'CDLL', lambda name: object())
    with pytest.raises(LatencyError, match='only glibc can be told to keep freed memory'):
        keep_freed_memory()
    monkeypatch.setattr(sys, 'platform', 'win32')
    with pytest.raises(LatencyError, match='only glibc'):
        keep_freed_memory()
