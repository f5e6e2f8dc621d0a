"""Where the output norms of a backbone go: into the 1x1 lateral convolutions of the FPN that reads them."""
from __future__ import annotations

from collections.abc import Iterator

from mmcv.cnn import ConvModule
from mmdet.models.detectors import FasterRCNN, MaskRCNN
from mmdet.models.necks import FPN
from torch import nn

from slab_det.backbones.swin import SLABSwin

from .folds import Fold, folds_of


# Detectors that hand the backbone's outputs to the neck and to nothing else.
@folds_of(MaskRCNN, FasterRCNN)
def output_norm_folds(detector: nn.Module) -> Iterator[Fold]:
    backbone, neck = detector.backbone, getattr(detector, 'neck', None)
    if type(backbone) is not SLABSwin:
        return
    for level, stage in enumerate(backbone.out_indices):
        lateral = level - getattr(neck, 'start_level', 0)
        yield Fold(f'backbone.norm{stage}', f'neck.lateral_convs.{lateral}.conv', obstacle=_obstacle(neck, level))


def _obstacle(neck: nn.Module | None, level: int) -> str:
    """Why the output norm of this level cannot move into the neck; '' if it can."""
    if type(neck) is not FPN:
        return f'the neck is {type(neck).__name__}, not FPN'
    if not neck.start_level <= level < neck.backbone_end_level:
        return 'the FPN does not read this level'
    num_levels = neck.backbone_end_level - neck.start_level
    if (neck.add_extra_convs == 'on_input' and neck.num_outs > num_levels
            and level == neck.backbone_end_level - 1):
        return f'neck.fpn_convs.{num_levels} reads the same map'
    lateral = neck.lateral_convs[level - neck.start_level]
    if not _is_plain_conv(lateral):
        return f'neck.lateral_convs.{level - neck.start_level} does more to its input than one convolution'
    return ''


def _is_plain_conv(module: ConvModule) -> bool:
    conv = module.conv
    return (module.order[0] == 'conv' and not module.with_explicit_padding and not module.with_spectral_norm
            and type(conv) is nn.Conv2d and conv.groups == 1 and not any(conv.padding))
