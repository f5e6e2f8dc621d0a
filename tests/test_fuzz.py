"""Forty cases of the fuzz; `python -m benchmarks.fuzz --draws 1000 --seed 0` checks more, and one by its seed."""

import pytest
from fuzz_cases import draw_case
from fuzz_checks import check_case


@pytest.mark.parametrize('seed', range(40))
def test_a_random_case_keeps_every_promise(seed):
    case = draw_case(seed)
    try:
        check_case(case)
    except Exception as error:
        raise AssertionError(f'{error}\n{case}') from error
