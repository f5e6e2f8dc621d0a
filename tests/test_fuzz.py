"""Forty cases of the fuzz; `python -m benchmarks.fuzz --draws 1000 --seed 0` checks more, and one by its seed."""

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
    assert is_exported(case) and check_onnx(case, tmp_path), case


def test_gamma_is_exact_after_a_cast():
    """Found by the fuzz: a model cast to float32 saved gamma in float32, and computed with float64's after loading."""
    case = next(case for case in map(draw_case, range(1000)) if case.backbone['norm_cfg']['type'] == 'PRepBN')
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(dataclasses.replace(case, gamma=0.3)).to(dtype)
        norms = named_progressive_norms(model).values()
        assert {float(norm._gamma) for norm in norms} == {norm.gamma for norm in norms} == {0.3}
