"""The parts of a detector that benchmarks.gpu captures, run without a GPU: calls stand in for graphs."""

import random

import torch
from graph_cases import EagerOperators, build

from benchmarks import gpu


def test_parts_of_a_detector_compute_what_the_whole_computes(monkeypatch):
    results = []

    def call_as_graph(function):
        return lambda *inputs: results.append(function(*inputs)) or results[-1]

    monkeypatch.setattr(gpu, 'GraphCache', call_as_graph)
    monkeypatch.setattr(gpu, 'FixedOperators', EagerOperators)
    for name, value in dict(DEVICE='cpu', SIZE=(60, 90), PADDED=(64, 96)).items():
        monkeypatch.setattr(gpu, name, value)
    parts = gpu.capture_parts(build('Mask R-CNN', random.Random(0)))
    assert [*parts] == ['backbone', 'neck', 'RPN, proposals', 'boxes', 'masks', 'whole graph']
    *_, boxes, masks, whole = results
    assert whole[0][0] > 0
    for found, expected in zip((*boxes[:3], *masks), whole[1:], strict=True):
        assert torch.equal(found, expected)
