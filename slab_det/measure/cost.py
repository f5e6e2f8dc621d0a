"""Counts multiply-adds, parameters and norms of a forward pass."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from slab_det.fusion.channels import output_parameters
from slab_det.fusion.folding import OTHER_NORMS
from slab_det.norms import ChannelAffine, OfflineNorm, named_norms


@dataclass(frozen=True)
class ModelCost:
    """Cost of one forward pass at batch 1.

    Attributes:
        multiply_adds: Multiply-adds of matrix products, convolutions and attention; the papers call them FLOPs.
            Elementwise operations, norms and operators of other libraries (NMS, RoIAlign) are not counted.
        parameters: Number of parameters; a shared parameter counts once.
        norms_left: Number of norm modules: LayerNorm, GroupNorm, RMSNorm, batch and instance norms, every
            :class:`~slab_det.norms.OfflineNorm`, and the ChannelAffine that fusion leaves where it cannot fold.
    """

    multiply_adds: int
    parameters: int
    norms_left: int


def measure_cost(parts: Sequence[nn.Module], forward: Callable[[], object]) -> ModelCost:
    """Runs ``forward`` once, and counts its multiply-adds and the parameters and norms of ``parts``.

    Args:
        parts: The modules that run in ``forward``.
        forward: The call to measure; its result is ignored.
    """
    parts = nn.ModuleList(parts)
    return ModelCost(
        multiply_adds=count_multiply_adds(forward),
        parameters=sum(parameter.numel() for parameter in parts.parameters()),
        # A norm that contains others (PRepBN) counts once.
        norms_left=sum(1 for _ in named_norms(parts, OfflineNorm, *OTHER_NORMS, ChannelAffine)),
    )


def count_multiply_adds(forward: Callable[[], object]) -> int:
    """Returns the multiply-adds of one call, except those inside torch.compile, which the counter does not see."""

    def linear_flops(x: torch.Size, *others: object, out_shape: torch.Size, **options: object) -> int:
        return 2 * out_shape.numel() * x[-1]

    def attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *others: object, **options: object) -> int:
        return sdpa_flop_count(q, k, v)

    def linear_relu_flops(bias: torch.Size, x: torch.Size, *others: object, **options: object) -> int:
        return linear_flops(x, **options)

    # FlopCounterMode has no formula for oneDNN linear layers and for linear layers with a ReLU and, before torch 2.15,
    # for attention on a CPU.
    internal = (
        (torch.ops.aten, '_addmm_activation', linear_relu_flops),
        (torch.ops.aten, '_scaled_dot_product_flash_attention_for_cpu', attention_flops),
        (torch.ops.mkldnn, '_linear_pointwise', linear_flops),
    )
    formulas = {getattr(library, name): flops for library, name, flops in internal if hasattr(library, name)}
    # Under inference mode FlopCounterMode does not see the operators inside composite ones.
    with torch.inference_mode(False), torch.no_grad():
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            forward()
    return counter.get_total_flops() // 2


class LayerCosts(TorchFunctionMode):
    """Counts the multiply-adds of each weight; softmax attention counts with the layer that reads its output."""

    def __init__(self) -> None:
        super().__init__()
        # By the address of the weight, because a layer may be applied in parts.
        self.costs, self.attention = defaultdict(float), 0.0

    def of(self, layer: nn.Module) -> float:
        """The multiply-adds of a layer; 0 for a layer without weights, such as an activation."""
        parameters = output_parameters(layer)
        return self.costs[parameters[0].untyped_storage().data_ptr()] if parameters else 0.0

    def __torch_function__(self, function: Callable, types: Sequence, args: Sequence = (), kwargs: dict | None = None):
        out = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            self.attention += q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        elif function in (F.linear, F.conv2d, F.conv_transpose2d):
            weight = args[1]
            size = args[0].numel() if function is F.conv_transpose2d else out.numel()
            self.costs[weight.untyped_storage().data_ptr()] += size * weight[0].numel() + self.attention
            self.attention = 0.0
        return out
