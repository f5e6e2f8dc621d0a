"""Forty cases of the fuzz; `python benchmarks/fuzz.py --draws 1000 --seed 0` checks more, and one by its seed."""

import dataclasses
import random

import pytest
import torch
from fuzz_cases import FAULTS, draw_case
from fuzz_checks import build_model, check_case
from fuzz_onnx import check_onnx, is_exported

from slab_det.norms import named_progressive_norms

ALL_FAULTS = [(kind, fault) for kind, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize('seed', range(40))
def test_a_random_case_keeps_every_promise(seed):
    case = draw_case(seed)
    try:
        check_case(case)
    except Exception as error:
        raise AssertionError(f'{error}\n{case}') from error


@pytest.mark.parametrize('seed', [4, 5, 17])
def test_an_exported_random_case_computes_the_same(seed, tmp_path):
    case = draw_case(seed)
    assert is_exported(case) and check_onnx(case, tmp_path) != 'refused', case


@pytest.mark.parametrize(('kind', 'fault'), ALL_FAULTS, ids=[f'{kind}, {fault.name}' for kind, fault in ALL_FAULTS])
def test_a_wrong_argument_is_refused_at_construction(kind, fault):
    for case in valid_cases(kind, 3, seed=fault.name):
        backbone = {**case.backbone, **fault.arguments(case.backbone)}
        check_case(dataclasses.replace(case, part='backbone', backbone=backbone, fault=fault))


def valid_cases(kind, count, seed):
    rng, cases = random.Random(seed), []
    while len(cases) < count:
        case = draw_case(rng.randrange(10**9))
        if case.backbone['type'] == kind and case.fault is None:
            cases.append(case)
    return cases


def test_draws_are_reproducible_and_varied():
    cases = [draw_case(seed) for seed in range(300)]
    assert cases == [draw_case(seed) for seed in range(300)]
    sound = [case for case in cases if case.fault is None]
    assert {case.part for case in sound} == {'backbone', 'faster_rcnn', 'mask_rcnn'}
    assert {case.dtype for case in sound} == {torch.float32, torch.float64}
    assert {case.backbone['norm_cfg']['type'] for case in sound} == {
        'LN',
        'TokenBN',
        'RepBN',
        'PRepBN',
        'UN',
        'MABN',
        'PowerNorm',
    }
    assert {case.backbone['type'] for case in sound} == {
        'SLABSwin',
        'SLABPVT',
        'SwinTransformer',
        'PyramidVisionTransformer',
        'PyramidVisionTransformerV2',
    }
    assert min(case.size for case in sound) == (32, 32)
    assert any(window == 1 for case in sound for window in windows(case))
    # Also larger than the map.
    assert any(max(case.size) < case.backbone['patch_size'] * window for case in sound for window in windows(case))


def windows(case):
    return case.backbone.get('window_sizes') or [size for size in [case.backbone.get('window_size')] if size]


def test_gamma_is_exact_after_a_cast():
    """Found by the fuzz: a model cast to float32 saved gamma in float32, and computed with float64's after loading."""
    case = next(
        case
        for case in map(draw_case, range(1000))
        if case.fault is None and case.backbone['norm_cfg']['type'] == 'PRepBN'
    )
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(dataclasses.replace(case, gamma=0.3)).to(dtype)
        norms = named_progressive_norms(model).values()
        assert {float(norm._gamma) for norm in norms} == {norm.gamma for norm in norms} == {0.3}
