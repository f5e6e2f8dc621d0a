"""deploy: the fastest form of a detector for inference."""

from __future__ import annotations

import copy

import torch
from mmengine.model import BaseModule
from torch import nn

from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.deployment.compiled import compile_networks
from slab_det.deployment.graphs import capture_graphs, check_graphs
from slab_det.deployment.heads import check_precision, lay_out_roi_features, lower_precision
from slab_det.deployment.linear import DeployedLinear, replace_linears
from slab_det.deployment.pvt import deploy_pvt
from slab_det.deployment.size_cache import SizeCached
from slab_det.deployment.swin import deploy_swin
from slab_det.norms import named_offline_norms
from slab_det.runtime.errors import DeploymentError

DEPLOYERS = {SLABSwin: deploy_swin, SLABPVT: deploy_pvt}


def deploy(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    compile: bool = False,
    cuda_graphs: bool = False,
    inplace: bool = False,
) -> nn.Module:
    """Gives a detector its fastest form for inference, with the results of ``model``.

    What depends only on the size of the input (windows, masks, position biases and tables) is kept per size; residuals
    are added in place; nothing is computed for the padding of windows that can be known before; maps are channels
    last. On a CPU, blocks run tile by tile, so that intermediate results stay in the cache, and linear layers on
    oneDNN.

    In float32 only the order of sums differs. The result has no gradients, and keys of its own in its state dict:
    save the model that it was made of.

    Args:
        model: A detector or backbone in eval mode; fused, for the fastest form.
        dtype: ``torch.bfloat16`` or ``torch.float16`` for the layers; boxes stay float32. None keeps float32.
        compile: Apply torch.compile to backbone, neck and RPN head, for each shape of the input.
        cuda_graphs: Capture backbone, neck and RPN head in a CUDA graph for each shape of the input. Features are then
            overwritten by the next image.
        inplace: Change ``model`` itself instead of a copy.

    Returns:
        The deployed model, with the same methods.

    Raises:
        DeploymentError: If the model is in training mode, has norms that await :func:`slab_det.fuse`, cannot compute
            in ``dtype``, or is not on a GPU with ``cuda_graphs``.
    """
    _check(model)
    check_precision(model, dtype)
    if cuda_graphs:
        check_graphs(model)
    if not inplace:
        model = copy.deepcopy(model)
    model.requires_grad_(False)
    backbone = getattr(model, 'backbone', model)
    # Exactly these: a subclass may keep the tokens that blocks overwrite.
    DEPLOYERS.get(type(backbone), lambda _: None)(backbone)
    replace_linears(model)
    for module in model.modules():
        # A subclass may compute with a view of its weight.
        if type(module) in (nn.Conv2d, nn.ConvTranspose2d):
            module.to(memory_format=torch.channels_last)
    # What is new starts in training mode.
    model.eval()
    roi_features = lay_out_roi_features(model)
    if dtype is not None:
        lower_precision(model, dtype)
    if compile:
        compile_networks(model)
    if cuda_graphs:
        capture_graphs(model, roi_features)
    model.deployed = True
    return model


def _check(model: nn.Module) -> None:
    if not hasattr(model, 'backbone') and (hasattr(model, 'module') or not isinstance(model, BaseModule)):
        raise DeploymentError(f'{type(model).__name__} is no detector or backbone; deploy what it wraps')
    if any(module.training for module in model.modules()):
        raise DeploymentError('the model is in training mode; call model.eval() before slab_det.deploy')
    if any(isinstance(module, SizeCached | DeployedLinear) for module in model.modules()):
        raise DeploymentError('the model is deployed already; deploy the fused model that it was made of')
    waiting = [name for name, norm in named_offline_norms(model)]
    if waiting:
        raise DeploymentError(
            f'{len(waiting)} norms are not fused ({waiting[0]}, ...); call slab_det.fuse before slab_det.deploy'
        )
