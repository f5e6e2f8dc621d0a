"""Forty cases of the fuzz; `python benchmarks/fuzz.py --draws 1000 --seed 0` checks more, and one by its seed."""

import dataclasses

import pytest
import torch
from fuzz_cases import draw_case
from fuzz_checks import build_model, check_case, check_onnx, is_exported

from slab_det.norms import named_progressive_norms


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


def test_draws_are_reproducible_and_varied():
    cases = [draw_case(seed) for seed in range(300)]
    assert cases == [draw_case(seed) for seed in range(300)]
    assert {case.part for case in cases} == {'backbone', 'faster_rcnn', 'mask_rcnn'}
    assert {case.dtype for case in cases} == {torch.float32, torch.float64}
    norms = {case.backbone['norm_cfg']['type'] for case in cases}
    assert norms == {'LN', 'TokenBN', 'RepBN', 'PRepBN', 'UN', 'MABN', 'PowerNorm'}
    kinds = {case.backbone['type'] for case in cases}
    pvt = 'PyramidVisionTransformer'
    assert kinds == {'SLABSwin', 'SLABPVT', 'SwinTransformer', pvt, f'{pvt}V2'}
    assert min(case.size for case in cases) == (32, 32)


def test_gamma_is_exact_after_a_cast():
    """Found by the fuzz: a model cast to float32 saved gamma in float32, and computed with float64's after loading."""
    case = next(case for case in map(draw_case, range(1000)) if case.backbone['norm_cfg']['type'] == 'PRepBN')
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(dataclasses.replace(case, gamma=0.3)).to(dtype)
        norms = named_progressive_norms(model).values()
        assert {float(norm._gamma) for norm in norms} == {norm.gamma for norm in norms} == {0.3}
