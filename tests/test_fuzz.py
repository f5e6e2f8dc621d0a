"""Random models keep every promise: forty, or as many as SLAB_DET_FUZZ says (`SLAB_DET_FUZZ=1000 pytest -n 2 FILE`)."""

import os

import pytest
from fuzz_cases import draw_case
from fuzz_checks import check_case


@pytest.mark.parametrize('seed', range(int(os.environ.get('SLAB_DET_FUZZ', 40))))
def test_a_random_case_keeps_every_promise(seed):
    case = draw_case(seed)
    try:
        check_case(case)
    except Exception as error:
        raise AssertionError(f'{error}\n{case}') from error
