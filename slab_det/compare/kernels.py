"""Finds layers for which PyTorch has a wrong kernel on this CPU.

On CPUs with AMX, PyTorch 2.15 with oneDNN 3.13 computes some bfloat16 convolutions whose kernel is their stride, as in
patch embeddings and spatial reductions, with a relative error above 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial

import torch
from mmcv.cnn import Conv2d as MmcvConv2d
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.compare.difference import rms_difference
from slab_det.runtime.errors import name_some

# mmcv's subclass computes the same.
PLAIN_CONVS = (nn.Conv2d, MmcvConv2d)
LAYERS = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
# Rounding the result is an error of at most half an eps; some kernels round partial sums too.
MAX_EPS = 8
REMEDY = (
    'start Python with the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or set '
    'torch.backends.mkldnn.enabled = False'
)


def is_wrong(layer: nn.Module, x: Tensor, output: Tensor) -> bool:
    """Whether rounding does not explain how far ``output``, of ``layer(x)``, is from the same layer in float64."""
    in_float64 = copy.copy(layer)
    in_float64._parameters = {
        name: None if value is None else value.double() for name, value in layer._parameters.items()
    }
    # Not a call, which would run hooks.
    error = rms_difference(output, in_float64.forward(x.double()))
    return not error <= MAX_EPS * torch.finfo(output.dtype).eps


@contextmanager
def find_wrong_layers(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Checks the half-precision convolutions and linear layers of a model on a CPU with the inputs that they get.

    Yields:
        The wrong layers by name, filled while the model runs.
    """
    found: dict[str, nn.Module] = {}

    def check(name: str, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        # The right result of an overflow is not finite.
        if inputs[0].dtype == output.dtype == layer.weight.dtype and output.isfinite().all():
            if is_wrong(layer, inputs[0], output):
                found[name] = layer

    hooks = [
        layer.register_forward_hook(partial(check, name))
        for name, layer in model.named_modules()
        if isinstance(layer, LAYERS) and layer.weight.dtype.itemsize == 2 and layer.weight.device.type == 'cpu'
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def warn_of_wrong_kernels(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Warns once if convolutions of ``model`` whose kernel is their stride are wrong in ``dtype`` on this CPU."""
    wrong = [
        name
        for name, layer in model.named_modules()
        if type(layer) in PLAIN_CONVS
        and layer.weight.device.type == 'cpu'
        and layer.kernel_size == layer.stride != (1, 1)
        and _is_patch_conv_wrong(layer.in_channels, layer.out_channels, layer.groups, layer.kernel_size, dtype)
    ]
    if wrong:
        _warn(
            f'PyTorch {torch.__version__} computes wrong values on this CPU for {len(wrong)} convolutions of '
            f'{type(model).__name__} in {dtype} ({name_some(wrong)}). Deployed models do not use these kernels; '
            f'training and inference of the model as it is in {dtype} do: {REMEDY}'
        )


@lru_cache(None)
def _is_patch_conv_wrong(
    in_channels: int, out_channels: int, groups: int, kernel_size: tuple[int, int], dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(in_channels, out_channels, kernel_size, kernel_size, groups=groups, bias=False, device='meta')
    layer = layer.to_empty(device='cpu').to(dtype)
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    x = torch.randn(1, in_channels, 4 * kernel_size[0], 4 * kernel_size[1], generator=generator).to(dtype)
    # Both memory formats: a kernel may be wrong in one of them.
    inputs = [x, x.to(memory_format=torch.channels_last)]
    with suppress(RuntimeError):  # PyTorch has no kernel, which is an error where the model runs
        return any(is_wrong(layer, x, layer(x)) for x in inputs)
    return False


@lru_cache(None)
def _warn(message: str) -> None:
    MMLogger.get_current_instance().warning(message)
