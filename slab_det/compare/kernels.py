"""Finds layers for which PyTorch has a wrong kernel on this CPU, and dtypes that it computes slowly.

On CPUs with AMX, PyTorch 2.15 with oneDNN 3.13 computes some bfloat16 convolutions whose kernel is their stride, as in
patch embeddings and spatial reductions, with a relative error above 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial

import torch
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.common.errors import name_some
from slab_det.common.tensors import HALF_PRECISIONS, map_tensors, tensors_in
from slab_det.norms.folds import CONV, CONV_TRANSPOSE, LINEAR
from slab_det.precisions import find_row

# Rounding the result is an error of at most half an eps; some kernels round partial sums too.
MAX_EPS = 8
REMEDY = (
    'start Python with the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or set '
    'torch.backends.mkldnn.enabled = False'
)


def is_wrong(layer: nn.Module, output: Tensor, *args: object, **kwargs: object) -> bool:
    """Whether rounding does not explain how far ``output``, of ``layer(...)``, is from the same layer in float64."""
    in_float64 = copy.copy(layer)
    in_float64._parameters = {
        name: None if value is None else value.double() for name, value in layer._parameters.items()
    }
    args, kwargs = map_tensors(Tensor.double, (args, kwargs))
    # Not a call, which would run hooks.
    expected, info = in_float64.forward(*args, **kwargs), torch.finfo(output.dtype)
    # Numbers below the smallest normal one have a fixed distance, instead of a relative one.
    step = info.eps * info.smallest_normal * output.numel() ** 0.5
    return not (output.double() - expected).norm() <= MAX_EPS * (info.eps * expected.norm() + step)


@contextmanager
def find_wrong_layers(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Checks the half-precision convolutions and linear layers of a model on a CPU with the inputs that they get.

    Yields:
        The wrong layers by name, filled while the model runs.
    """
    found: dict[str, nn.Module] = {}

    def check(name: str, layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        # The right result of an overflow is not finite.
        if {x.dtype for x in tensors_in((args, kwargs, output))} == {layer.weight.dtype} and output.isfinite().all():
            if is_wrong(layer, output, *args, **kwargs):
                found[name] = layer

    hooks = [
        layer.register_forward_hook(partial(check, name), with_kwargs=True)
        for name, layer in model.named_modules()
        if type(layer) in (*LINEAR, *CONV, *CONV_TRANSPOSE) and _is_half(layer._parameters.get('weight'))
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_half(weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype in HALF_PRECISIONS and weight.device.type == 'cpu'


@torch.no_grad()
def warn_of_precision(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Warns once if this CPU computes ``dtype`` slowly, and once if convolutions of ``model`` are wrong in it.

    Convolutions whose kernel is their stride are checked. None and float32 are neither slow nor wrong.
    """
    weight, precision = next(model.parameters(), None), str(dtype).removeprefix('torch.')
    if weight is None or dtype in (None, torch.float32):
        return
    row = find_row('eager', weight.device.type, precision)
    if row is None:
        return
    if not row.need.is_met():
        _warn(f'{precision} is slower than float32 on this machine, because it needs {row.need.name}')
    wrong = [
        name
        for name, layer in model.named_modules()
        if type(layer) in CONV
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
        return any(is_wrong(layer, layer(x), x) for x in inputs)
    return False


@lru_cache(None)
def _warn(message: str) -> None:
    MMLogger.get_current_instance().warning(message)
