"""What other tests compare with."""

import pytest
import torch
from conftest import relative_difference


@pytest.mark.parametrize('place', [0, 1])
def test_a_nan_in_any_output_is_within_no_bound(place):
    outputs, references = torch.randn(2, 2, 3)
    assert relative_difference(outputs, outputs) <= 1e-9
    outputs[place, 1] = torch.nan
    assert not relative_difference(outputs, references) <= 1e9


def test_the_largest_difference_is_relative_to_the_largest_value_of_its_output():
    references = torch.tensor([[1.0, -4.0]]), torch.tensor([100.0, 50.0])
    outputs = torch.tensor([[1.0, -3.0]]), torch.tensor([100.0, 60.0])
    assert relative_difference(outputs, references) == 0.25
    with pytest.raises(AssertionError):
        relative_difference(outputs, (references[0][0], references[1]))
