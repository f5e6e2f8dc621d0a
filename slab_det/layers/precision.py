"""Which arithmetic half precision must not be trusted with."""
import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Raises half precision to float32 and leaves float32 and float64 alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
