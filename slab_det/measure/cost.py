"""What a forward pass costs besides time: multiply-adds, parameters, memory, and the norms that are left."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from slab_det.norms import ChannelAffine, named_offline_norms

# _NormBase is what torch's batch and instance norms share.
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase, ChannelAffine)


@dataclass(frozen=True)
class ModelCost:
    """Cost of one forward pass at batch 1, of the same submodules and the same call as a latency beside it.

    Attributes:
        multiply_adds: Of matrix products, convolutions and attention, as they are executed: two floating-point
            operations each, the unit of the papers' "FLOPs". Elementwise work, norms and operators of other
            libraries (NMS, RoIAlign) are not counted.
        parameters: Numbers in parameters; a shared one counts once.
        weights_bytes: Parameters and buffers.
        forward_bytes: The most memory that the first forward held at one time on top of them and of its input, with
            the windows, masks and biases that it leaves behind for later ones of this size.
        norms_left: Norm modules: LayerNorm, GroupNorm, RMSNorm, batch and instance norms, every
            :class:`~slab_det.norms.OfflineNorm`, and the ChannelAffine that fusion leaves where it cannot fold.
    """

    multiply_adds: int
    parameters: int
    weights_bytes: int
    forward_bytes: int
    norms_left: int

    @property
    def peak_bytes(self) -> int:
        """All that the model needs at one time."""
        return self.weights_bytes + self.forward_bytes


def measure_cost(parts: Sequence[nn.Module], forward: Callable[[], object], device: torch.device) -> ModelCost:
    """Runs ``forward`` twice, once to watch the allocator and once to count.

    Neither torch.compile nor CUDA graphs may be applied yet: they hide the operators from the counter. What the model
    keeps per size is seen only if it did not run at this size before.

    Args:
        parts: The modules that run in ``forward``.
        forward: The call to measure; what it returns is dropped.
        device: Where they are, 'cpu' or 'cuda'.
    """
    parts = nn.ModuleList(parts)
    with torch.no_grad():
        forward_bytes = measure_memory(forward, device)
    return ModelCost(
        multiply_adds=count_multiply_adds(forward),
        parameters=sum(parameter.numel() for parameter in parts.parameters()),
        weights_bytes=sum(tensor.nbytes for tensor in [*parts.parameters(), *parts.buffers()]),
        forward_bytes=forward_bytes,
        norms_left=count_norms(parts),
    )


def count_norms(model: nn.Module) -> int:
    """The number of norm modules in a model; a norm that is made of others (PRepBN) counts once."""
    offline = [norm for _, norm in named_offline_norms(model)]
    inside = {part for norm in offline for part in norm.modules()}
    return len(offline) + sum(isinstance(module, NORMS) and module not in inside for module in model.modules())


def count_multiply_adds(forward: Callable[[], object]) -> int:
    """Multiply-adds of one call, by torch's counter."""
    # No inference mode: composite operators would reach the counter whole.
    with torch.inference_mode(False), torch.no_grad():
        with FlopCounterMode(display=False, custom_mapping=_more_formulas()) as counter:
            forward()
    return counter.get_total_flops() // 2


def measure_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that one call allocates at one time.

    Read from torch's allocators: on CUDA from ``torch.cuda.max_memory_allocated``, on a CPU from torch.profiler. Memory
    that C libraries take for themselves does not pass these allocators.
    """
    if device.type == 'cuda':
        # The first product of a process allocates the library's workspace, which is no model's own.
        torch.ones(8, 8, device=device).mm(torch.ones(8, 8, device=device))
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():
        recorder.start()
    call()
    with _silent_stderr():
        recorder.stop()
    # One event for each allocation, of what it adds, and for each release.
    events = [event for event in recorder.profiler.kineto_results.events() if event.name() == '[memory]']
    return max(accumulate((event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), initial=0))


def _more_formulas() -> dict[torch._ops.OpOverloadPacket, Callable[..., int]]:
    """Formulas for the linear layers of deployed models, which torch's counter does not know."""

    def linear_flops(x: torch.Size, *others: object, out_shape: torch.Size, **options: object) -> int:
        return 2 * out_shape.numel() * x[-1]

    return {torch.ops.mkldnn._linear_pointwise: linear_flops} if torch.backends.mkldnn.is_available() else {}


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hides what C++ writes: torch's profiler announces its start and stop, and that there is no GPU."""
    kept = os.dup(2)
    with open(os.devnull, 'w') as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
