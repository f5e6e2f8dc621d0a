"""torch.compile of a deployed detector's networks, one fixed shape at a time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from slab_det.deployment.size_cache import pin_sizes

# As many as torch.compile makes of one function. Images of a test set padded to multiples of 128 rather than 32
# (data_preprocessor.pad_size_divisor) have few shapes.
MAX_SHAPES = 8


class ShapeCompiled:
    """A forward that is compiled for each of the first ``MAX_SHAPES`` shapes of its inputs; the others run eagerly.

    Args:
        module: Whose forward to compile.
        options: Arguments of ``torch.compile``.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self._module = module
        self._eager = module.forward
        self._compiled = torch.compile(module.forward, dynamic=False, **options)
        self._shapes: set[Hashable] = set()
        self._warned = False

    def __call__(self, *inputs: Any) -> Any:
        shape = _shape_of(inputs)
        if shape in self._shapes:
            return self._compiled(*inputs)
        if len(self._shapes) == MAX_SHAPES:
            if not self._warned:
                print_log(
                    f'more than {MAX_SHAPES} input shapes: this one runs uncompiled; raise '
                    'data_preprocessor.pad_size_divisor to have fewer',
                    'current',
                )
                self._warned = True
            return self._eager(*inputs)
        self._shapes.add(shape)
        # The first, eager pass keeps what depends on the size only: compiled code then has it as constants.
        outputs = self._eager(*inputs)
        pin_sizes(self._module)
        return outputs


def compile_networks(model: nn.Module, **options: Any) -> None:
    """Compiles backbone, neck and RPN head of a detector, or a backbone, in place; ``options`` of torch.compile."""
    parts = [getattr(model, name, None) for name in ('backbone', 'neck', 'rpn_head')]
    for module in filter(None, parts if parts[0] is not None else [model]):
        module.forward = ShapeCompiled(module, **options)


def _shape_of(inputs: Any) -> Hashable:
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape), inputs.dtype, inputs.device
    return tuple(map(_shape_of, inputs)) if isinstance(inputs, tuple | list) else inputs
