"""Forty cases of the fuzz; `python -m benchmarks.fuzz --draws 1000 --seed 0` checks more, and one by its seed."""

import pytest
from fuzz_cases import draw_case
from fuzz_checks import check_case, check_onnx, is_exported


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
