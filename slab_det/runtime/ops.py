"""Implements NMS and RoIAlign with torchvision for an mmcv without compiled operators.

mmdet imports ``mmcv.ops``, which imports all operators from the extension ``mmcv._ext``. If the extension was not
compiled, :class:`TorchvisionOps` replaces it.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

import mmcv
import torch
import torchvision
from torch import Tensor

from slab_det.common.errors import SlabDetError

EXTENSION = 'mmcv._ext'
COMPILE = 'pip install --force-reinstall --no-deps --no-build-isolation --no-binary onedl-mmcv onedl-mmcv'


def install_ops() -> None:
    """Replaces ``mmcv._ext`` if mmcv has no compiled operators."""
    if EXTENSION not in sys.modules and find_spec(EXTENSION) is None:
        sys.modules[EXTENSION] = mmcv._ext = TorchvisionOps()


class TorchvisionOps(ModuleType):
    """A module that replaces ``mmcv._ext``. Operators that torchvision lacks raise SlabDetError when called."""

    def __init__(self) -> None:
        super().__init__(EXTENSION, self.__doc__)
        # importlib raises ValueError for a module without a spec. A spec without a loader tells
        # mmcv.utils.check_ops_exist() that nothing is compiled.
        self.__spec__ = ModuleSpec(EXTENSION, loader=None, origin=__file__)
        self.nms = nms
        self.roi_align_forward = roi_align_forward
        self.roi_align_backward = roi_align_backward
        # mmcv's collect_env calls these two.
        self.get_compiler_version = lambda: f'not compiled, operators of torchvision {torchvision.__version__}'
        self.get_compiling_cuda_version = lambda: 'not compiled'

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        # A __path__ would make the module a package.
        if name.startswith('__'):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
            raise_unavailable(name)

        return unavailable


def raise_unavailable(op: str) -> NoReturn:
    """Raises the SlabDetError for an operator that is not compiled in mmcv and missing in torchvision."""
    raise SlabDetError(
        f'mmcv.ops: the operator "{op}" is not compiled, and torchvision supplies only nms and roi_align (average '
        f'pooling). Choose a model without this operator, or compile mmcv, which needs a C++ compiler:\n  {COMPILE}'
    )


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Returns the indices of the boxes that greedy NMS keeps, by descending score.

    Args:
        boxes: Corners x1, y1, x2, y2.
        scores: One per box.
        iou_threshold: A box is removed if its IoU with a better one is larger.
        offset: Added to widths and heights: 1 if x2 and y2 are the last pixel inside the box, as in MMDetection 1.

    Shape:
        (N, 4), (N,) -> (M,)
    """
    # torchvision needs boxes and scores of one dtype; under AMP boxes are float32 and scores float16.
    dtype = torch.promote_types(torch.promote_types(boxes.dtype, scores.dtype), torch.float32)
    boxes = boxes.to(dtype)
    if offset:
        # Adds the offset to all widths, heights and intersections.
        boxes = boxes + boxes.new_tensor([0, 0, offset, offset])
    return torchvision.ops.nms(boxes, scores.to(dtype), iou_threshold)


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, **options: Any
) -> None:
    """Average-pools each RoI of ``input`` into ``output``, in place.

    The arguments are the same as in mmcv; ``argmax_y`` and ``argmax_x``, for maximum pooling, are not used.

    Shape:
        (B, C, H, W), (K, 5), (K, C, aligned_height, aligned_width)

    Raises:
        SlabDetError: If ``pool_mode`` is maximum.
    """
    scale, height, width, ratio, aligned = roi_align_options(**options)
    # torchvision has no bfloat16 kernels.
    dtype = torch.promote_types(input.dtype, torch.float32)
    output.copy_(torchvision.ops.roi_align(input.to(dtype), rois.to(dtype), (height, width), scale, ratio, aligned))


def roi_align_backward(
    grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor, grad_input: Tensor, **options: Any
) -> None:
    """Writes the gradient of :func:`roi_align_forward` with respect to ``input`` into ``grad_input``."""
    scale, height, width, ratio, aligned = roi_align_options(**options)
    dtype = torch.promote_types(grad_output.dtype, torch.float32)
    # Autograd through torchvision.ops.roi_align would repeat the forward pass.
    backward = torch.ops.torchvision._roi_align_backward
    grad_input.copy_(
        backward(grad_output.to(dtype), rois.to(dtype), scale, height, width, *grad_input.shape, ratio, aligned)
    )


def roi_align_options(
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> tuple[float, int, int, int, bool]:
    """Returns the options of mmcv's RoIAlign in torchvision's order, and raises SlabDetError for maximum pooling."""
    if pool_mode != 1:
        raise_unavailable("roi_align with pool_mode='max'")
    return spatial_scale, aligned_height, aligned_width, sampling_ratio, aligned
