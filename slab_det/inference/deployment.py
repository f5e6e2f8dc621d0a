"""deploy: replaces the layers of a detector by the fastest ones for inference on its device."""

from __future__ import annotations

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.backbones.adopt import adopt, replace_layers
from slab_det.backbones.base import Backbone
from slab_det.backbones.blocks import deployed_merging
from slab_det.common.errors import DeploymentError
from slab_det.common.modules import copy_module, is_deployed
from slab_det.common.tensors import HALF_PRECISIONS, check_finite
from slab_det.compare.kernels import warn_of_precision
from slab_det.families.deformable import deployed_deformable
from slab_det.families.half_precision import keep_boxes_float32, lower_precision
from slab_det.families.masks import check_mask_format, encode_masks
from slab_det.inference.cpu.patch_conv import patch_conv
from slab_det.inference.cpu.roi_align import deployed_roi_align
from slab_det.inference.cpu.winograd import winograd_conv
from slab_det.inference.gpu.deformable_kernels import triton_deformable
from slab_det.inference.gpu.ffn_kernels import triton_ffn
from slab_det.inference.gpu.graph import use_graphs
from slab_det.inference.gpu.layers import TritonConv, fused_conv, fused_fpn
from slab_det.inference.gpu.window_kernels import triton_windows
from slab_det.inference.trial import try_deployed
from slab_det.norms import named_offline_norms


def deploy(
    model: nn.Module, dtype: torch.dtype | None = None, *, inplace: bool = False, masks: str = 'full'
) -> nn.Module:
    """Makes a detector faster for inference; its results differ by rounding.

    slab_det's blocks replace mmdet's, and feature maps are channels last. On a CPU, RoIAlign and 3x3 convolutions
    have faster forms. On a GPU, blocks run as Triton kernels, and ``predict`` of a single image replays the CUDA graph
    for its size.

    A deployed model has no gradients, and its state dict has other keys: save the original model instead.

    The original and the deployed model run on a small noise image (:func:`~slab_det.inference.trial.try_deployed`).
    ``deployment_check`` of the deployed model holds their difference.

    Args:
        model: A detector or backbone of slab_det or mmdet, in eval mode, on the device where it will run. Its offline
            norms must be fused.
        dtype: ``torch.bfloat16`` or ``torch.float16`` for the layers, of detectors with queries for those of
            backbone, neck and encoder; boxes stay float32. None, or ``torch.float32``, keeps the dtype of the model.
        inplace: Change ``model`` itself instead of a copy: it gets new submodules. References to its former
            submodules and parameters, as optimizers hold them, still refer to the original ones.
        masks: 'full', or 'rle': ``pred_instances.masks`` is a list of COCO RLE; see :func:`slab_det.load_detector`.

    Returns:
        The deployed model, with the same methods.

    Raises:
        DeploymentError: If the model is in training mode, deployed already or not fused, has weights that are
            not finite or no masks to encode, or its deployed form does not run or computes something else. The
            model is then unchanged.
    """
    if not hasattr(model, 'backbone') and (hasattr(model, 'module') or not isinstance(model, BaseModule)):
        raise DeploymentError(f'{type(model).__name__} is not a detector or backbone; deploy the model that it wraps')
    if any(module.training for module in model.modules()):
        raise DeploymentError('the model is in training mode; call model.eval() before slab_det.deploy')
    if is_deployed(model):
        raise DeploymentError('the model is deployed already; deploy the fused model that it was made of')
    unfused = [name for name, norm in named_offline_norms(model)]
    if unfused:
        raise DeploymentError(
            f'{len(unfused)} norms are not fused ({unfused[0]}, ...); call slab_det.fuse before slab_det.deploy, '
            'or add --fuse to the command'
        )
    check_mask_format(masks, DeploymentError)
    check_finite(model, DeploymentError)
    dtype = None if dtype == torch.float32 else dtype
    warn_of_precision(model, dtype)
    deployed = copy_module(model)
    if masks == 'rle':
        encode_masks(deployed)
    on_cpu = _is_on_cpu(model)
    _change_form(deployed, dtype, on_cpu)
    if not next(model.parameters()).is_meta:
        check = try_deployed(model, deployed, dtype)
        if check is not None:
            deployed.deployment_check = check
    deployed.deployed = True
    if inplace:
        # Only now: until here an error leaves every module and parameter of ``model`` as it was.
        vars(model).update(vars(deployed))
        deployed = model
    # From here on hooks and graphs refer to the model that is returned, and no longer to a copy.
    _refuse_checkpoints(deployed)
    if hasattr(deployed, 'data_preprocessor') and not on_cpu:
        use_graphs(deployed, masks)
    return deployed


def _change_form(model: nn.Module, dtype: torch.dtype | None, on_cpu: bool) -> None:
    """Replaces and casts the layers of ``model``, in place."""
    model.requires_grad_(False)
    backbone = getattr(model, 'backbone', model)
    adopt(model)
    for module in backbone.modules():
        if isinstance(module, Backbone):
            # Tokens are (B, L, C): a channels-last map is a view of them.
            module.channels_last = True
    replace_layers(backbone, deployed_merging)
    replace_layers(model, deployed_deformable if on_cpu else triton_deformable)
    if on_cpu:
        replace_layers(model, deployed_roi_align)
        is_half = (dtype or next(model.parameters()).dtype) in HALF_PRECISIONS
        replace_layers(model, patch_conv if is_half else winograd_conv)
    else:
        replace_layers(backbone, triton_windows)
        replace_layers(backbone, triton_ffn)
        replace_layers(model, fused_conv)
        replace_layers(model, fused_fpn)
    for module in model.modules():
        # A subclass may compute with a view of its weight.
        if type(module) in (nn.Conv2d, TritonConv, nn.ConvTranspose2d):
            module.to(memory_format=torch.channels_last)
    # New modules start in training mode.
    model.eval()
    if dtype is not None:
        lower_precision(model, dtype)
    keep_boxes_float32(model)
    backbone.register_forward_pre_hook(_check_inference_only)


def _is_on_cpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == 'cpu'


def _check_inference_only(backbone: nn.Module, inputs: tuple) -> None:
    has_gradients = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    # PyTorch 2.6 cannot tell an export from torch.compile, which may run a deployed model.
    is_traced = torch.jit.is_tracing() or getattr(torch.compiler, 'is_exporting', bool)()
    if backbone.training or has_gradients or is_traced:
        raise DeploymentError(
            'a deployed model only predicts, in eval mode, without gradients, tracing and export: use the fused model '
            'that it was made of; slab_det.export.export_onnx exports the fused model to ONNX'
        )


def _refuse_checkpoints(model: nn.Module) -> None:
    """Makes each module of a deployed model refuse checkpoints, because a part may be loaded by itself."""
    for module in model.modules():
        # The other checks are of the model before deployment.
        module._load_state_dict_pre_hooks.clear()
        module.register_load_state_dict_pre_hook(_refuse_weights)


def _refuse_weights(module: nn.Module, *_: object) -> None:
    raise DeploymentError(
        f'this {type(module).__name__} is deployed, and its weights have other names and layouts than those of a '
        'checkpoint; load the checkpoint into the fused model that it was made of, and deploy that model again'
    )
