"""deploy: the fastest form of a detector for inference."""
from __future__ import annotations

import copy

import torch
from torch import nn

from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.errors import DeploymentError
from slab_det.layers.offline_norm import named_offline_norms

from .compiled import compile_networks
from .graphs import capture_graphs
from .heads import lower_precision, share_roi_features
from .linear import replace_linears
from .pvt import deploy_pvt
from .swin import deploy_swin

DEPLOYERS = {SLABSwin: deploy_swin, SLABPVT: deploy_pvt}


def deploy(model: nn.Module, dtype: torch.dtype | None = None, compile: bool = False, cuda_graphs: bool = False,
           inplace: bool = False) -> nn.Module:
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
    if model.training:
        raise DeploymentError('the model is in training mode; call model.eval() before slab_det.deploy')
    waiting = [name for name, norm in named_offline_norms(model)]
    if waiting:
        raise DeploymentError(f'{len(waiting)} norms are not fused ({waiting[0]}, …); call slab_det.fuse before '
                              'slab_det.deploy')
    if not inplace:
        model = copy.deepcopy(model)
    model.requires_grad_(False)
    backbone = getattr(model, 'backbone', model)
    for kind, deploy_backbone in DEPLOYERS.items():
        if isinstance(backbone, kind):
            deploy_backbone(backbone)
    replace_linears(model)
    model.to(memory_format=torch.channels_last)
    share_roi_features(model)
    if dtype is not None:
        lower_precision(model, dtype)
    if compile:
        compile_networks(model)
    if cuda_graphs:
        capture_graphs(model)
    model.deployed = True
    return model
