"""MACHINE tells what a process may use, and a pretended machine decides which forms run."""

from __future__ import annotations

import os
import re

import pytest
import torch
from conftest import PRETENDED, pretend_machine
from torch import nn

from slab_det import machine
from slab_det.common.errors import SlabDetError
from slab_det.compare import kernels
from slab_det.compare.kernels import warn_of_precision
from slab_det.inference.forms import Form, list_forms
from slab_det.machine import Machine, find_device

ON_CPU = {
    *('eager', 'deployed', 'deployed-bfloat16', 'onnxruntime', 'onnxruntime-int8'),
    *('openvino', 'openvino-bfloat16', 'openvino-int8'),
}
BFLOAT16 = {'deployed-bfloat16', 'openvino-bfloat16'}


@pytest.mark.parametrize('kind', PRETENDED)
def test_forms_that_run_are_those_of_the_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_machine(kind, monkeypatch)
    found = {device: {f.key for f in list_forms(device) if not f.find_missing(device)} for device in ('cpu', 'cuda')}
    expected = dict(cpu=ON_CPU - BFLOAT16 if kind == 'avx2' else ON_CPU, cuda=set())
    if kind == 'gpu':
        expected['cuda'] = {'eager', 'deployed', 'deployed-float16'}
    assert found == expected


def test_a_form_says_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_machine('avx2', monkeypatch)
    missing = {form.key: form.find_missing('cpu') for form in list_forms('cpu')}
    assert {key for key, reason in missing.items() if reason} == BFLOAT16
    assert all('a CPU that multiplies bfloat16' in missing[key] for key in BFLOAT16)


def test_a_form_without_a_row_says_so() -> None:
    assert 'openvino does not compute float16 on cpu' in Form('openvino', 'float16').find_missing('cpu')


@pytest.mark.parametrize(
    ('kind', 'dtype', 'message'),
    [
        ('avx2', torch.bfloat16, 'bfloat16 is slower than float32 on this machine, .* a CPU that multiplies bfloat16'),
        ('avx512', torch.float16, 'float16 is slower than float32 on this machine, .* a CPU that multiplies float16'),
        ('amx', torch.float16, ''),
        ('avx512', torch.bfloat16, ''),
        ('avx2', torch.float32, ''),
        ('avx2', None, ''),
    ],
)
def test_a_precision_that_is_slow_here_is_told(kind, dtype, message, monkeypatch, logged) -> None:
    pretend_machine(kind, monkeypatch)
    monkeypatch.setattr(kernels, '_warn', kernels._warn.__wrapped__)
    warn_of_precision(nn.Linear(2, 2), dtype)
    assert re.search(message, logged.text) if message else not logged.text


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, expected in (('avx2', 'cpu'), ('gpu', 'cuda')):
        with monkeypatch.context() as patch:
            pretend_machine(kind, patch)
            # No tensor can be made on a GPU that is pretended.
            patch.setattr(torch, 'empty', lambda *_, **__: None)
            assert find_device() == torch.device(expected)
    with pytest.raises(SlabDetError, match="'cuda:77' is not available.*give device 'cpu'"):
        find_device('cuda:77')


def test_processors_are_those_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {3}, raising=False)
    monkeypatch.setattr(os, 'cpu_count', lambda: 64)
    assert Machine().processors == 1


@pytest.mark.parametrize(
    ('texts', 'expected'),
    [
        (['150000 100000\n'], 2),
        (['max 100000\n'], 8),
        (['50000\n', '100000\n'], 1),
        (['-1\n', '100000\n'], 8),
        ([], 8),
    ],
)
def test_processors_are_those_of_the_quota(texts, expected, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [str(tmp_path / f'{i}') for i in range(len(texts))] or [str(tmp_path / 'absent')]
    for file, text in zip(files, texts, strict=False):
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(machine, '_QUOTAS', (tuple(files),))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {*range(8)}, raising=False)
    assert Machine().processors == expected


def test_instructions_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'flags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_bf16 amx_tile amx_bf16\n'
    monkeypatch.setattr(machine, 'read_cpuinfo', lambda: text + text)
    assert Machine().instructions == ('amx_bf16', 'amx_tile', 'avx2', 'avx512_bf16', 'avx512f')
    monkeypatch.setattr(machine, 'read_cpuinfo', lambda: '')
    assert Machine().instructions == ()
