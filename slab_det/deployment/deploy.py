"""deploy: replaces the layers of a detector by the fastest ones for inference on its device."""

from __future__ import annotations

import torch
from mmdet.structures import DetDataSample
from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.backbones.base import Backbone
from slab_det.deployment.blocks import replace_layers, replace_stock_blocks
from slab_det.deployment.cpu.blocks import tile_blocks
from slab_det.deployment.cpu.linear import deployed_linear
from slab_det.deployment.cpu.roi_align import deployed_roi_align
from slab_det.deployment.cpu.winograd import winograd_conv
from slab_det.deployment.gpu.blocks import fused_ffn, fused_windows
from slab_det.deployment.gpu.graph import use_graphs
from slab_det.deployment.gpu.layers import FusedConv, fuse_fpn, fused_conv
from slab_det.deployment.masks import check_form, encode_masks
from slab_det.deployment.patch_merging import deployed_merging
from slab_det.deployment.precision import check_precision, lower_precision
from slab_det.deployment.trial import try_deployed
from slab_det.fusion.verify import check_finite
from slab_det.norms import copy_module, named_offline_norms
from slab_det.runtime.errors import DeploymentError


def deploy(
    model: nn.Module, dtype: torch.dtype | None = None, *, inplace: bool = False, masks: str = 'full'
) -> nn.Module:
    """Gives a detector a faster form for inference, with the results of ``model``.

    Our blocks replace mmdet's: they compute nothing for padding tokens whose result is known before. Feature maps and
    convolutions are channels last. On a CPU, blocks run tile by tile and add residuals in place, so that intermediate
    results stay in the cache, linear layers run on oneDNN where it is faster, and RoIAlign reads channels-last maps
    without a copy. On a GPU, blocks run as kernels in Triton, and ``predict`` of a single image replays a CUDA graph
    for images of its size (:mod:`slab_det.deployment.gpu.graph`).

    In float32 results differ by rounding: sums have other orders, and on a CPU 3x3 convolutions have fewer
    multiplications (:class:`~slab_det.deployment.cpu.winograd.WinogradConv`). A deployed model has no gradients, and
    its state dict has keys of its own: save the model that it was made of.

    Both models run on a small image of noise (:func:`~slab_det.deployment.trial.try_deployed`). A deployed model that
    does not run, or computes something else, is refused. Its ``deployment_check`` says how far the two are apart.

    Args:
        model: A detector or backbone, ours or mmdet's, in eval mode, on the device where it will run; fused, for the
            fastest form.
        dtype: ``torch.bfloat16`` or ``torch.float16`` for the layers; boxes stay float32. None, or
            ``torch.float32``, keeps the dtype of the model.
        inplace: Change ``model`` itself instead of a copy; the copy is then the reference of the check.
        masks: 'full', or 'rle' for a list of COCO RLE in ``pred_instances.masks``, see :func:`slab_det.load_detector`.

    Returns:
        The deployed model, with the same methods.

    Raises:
        DeploymentError: If the model is in training mode, has norms that :func:`slab_det.fuse` would fold or weights
            that are not finite, or cannot compute in this form or in ``dtype``, or cannot encode masks. The model is
            then unchanged.
    """
    if not hasattr(model, 'backbone') and (hasattr(model, 'module') or not isinstance(model, BaseModule)):
        raise DeploymentError(f'{type(model).__name__} is no detector or backbone; deploy what it wraps')
    if any(module.training for module in model.modules()):
        raise DeploymentError('the model is in training mode; call model.eval() before slab_det.deploy')
    if is_deployed(model):
        raise DeploymentError('the model is deployed already; deploy the fused model that it was made of')
    waiting = [name for name, norm in named_offline_norms(model)]
    if waiting:
        raise DeploymentError(
            f'{len(waiting)} norms are not fused ({waiting[0]}, ...); call slab_det.fuse before slab_det.deploy'
        )
    check_form(masks, DeploymentError)
    if dtype == torch.float32:
        dtype = None
    check_finite(model, DeploymentError)
    if dtype is not None:
        check_precision(model, dtype)
    original, deployed = copy_module(model), model
    if not inplace:
        original, deployed = deployed, original
    try:
        if masks == 'rle':
            encode_masks(deployed)
        _change_form(deployed, dtype)
        if not next(deployed.parameters()).is_meta:
            check = try_deployed(original, deployed, dtype)
            if check is not None:
                deployed.deployment_check = check
    except Exception:
        # With inplace this is the caller's model, whose modules have been replaced and cast by now.
        vars(deployed).update(vars(original))
        raise
    deployed.deployed = True
    if hasattr(deployed, 'data_preprocessor') and not _is_on_cpu(deployed):
        use_graphs(deployed, masks)
    return deployed


def _change_form(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replaces and casts the layers of ``model``, in place."""
    model.requires_grad_(False)
    backbone, on_cpu = getattr(model, 'backbone', model), _is_on_cpu(model)
    replace_stock_blocks(backbone)
    for module in backbone.modules():
        if isinstance(module, Backbone):
            # Tokens are channels last: maps are then views of them.
            module.channels_last = True
    replace_layers(backbone, deployed_merging)
    if on_cpu:
        tile_blocks(backbone)
        replace_layers(model, deployed_linear)
        replace_layers(model, deployed_roi_align)
        if dtype is None:
            replace_layers(model, winograd_conv)
    else:
        replace_layers(backbone, fused_windows)
        replace_layers(backbone, fused_ffn)
        replace_layers(model, fused_conv)
        fuse_fpn(model)
    for module in model.modules():
        # A subclass may compute with a view of its weight.
        if type(module) in (nn.Conv2d, FusedConv, nn.ConvTranspose2d):
            module.to(memory_format=torch.channels_last)
    # New modules start in training mode.
    model.eval()
    if dtype is not None:
        lower_precision(model, dtype)
    backbone.register_forward_pre_hook(_refuse_other_uses)


def _is_on_cpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == 'cpu'


def _refuse_other_uses(backbone: nn.Module, inputs: tuple) -> None:
    if backbone.training:
        raise DeploymentError('a deployed model is in training mode: call eval(), and train the model it was made of')
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        # Its tiles would fit images of one size.
        raise DeploymentError(
            'a deployed model is not traced or exported: take the fused model that it was made of, for ONNX with '
            'slab_det.deployment.export.export_onnx'
        )
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise DeploymentError('a deployed model has no gradients: take the gradients of the model that it was made of')


@torch.no_grad()
def warm(model: nn.Module, *sizes: tuple[int, int]) -> None:
    """Runs a deployed detector on a black image of each size, so that the first real one takes no longer than others.

    Args:
        model: The deployed detector, or the ``model`` of what :func:`slab_det.load_detector` returned.
        *sizes: (height, width) of images after the resize of the test pipeline.
    """
    for size in sizes:
        metainfo = dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0), img_id=0, img_path='')
        image = torch.zeros(3, *size, dtype=torch.uint8)
        model.test_step(dict(inputs=[image], data_samples=[DetDataSample(metainfo=metainfo)]))


def is_deployed(model: nn.Module) -> bool:
    """Whether :func:`deploy` made this model."""
    return getattr(model, 'deployed', False)
