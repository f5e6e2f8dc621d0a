"""Which arithmetic half precision must not be trusted with."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    """Raises half precision to float32 and leaves float32 and float64 alone."""
    return x.float() if x.dtype in HALF else x


def as_half_parameter(x: Tensor, parameter: Tensor) -> Tensor:
    """Lowers ``x`` to the dtype of a parameter in half precision; beside any other parameter it stays as it is."""
    return x.to(parameter.dtype) if parameter.dtype in HALF else x
