"""Where the output norms of a backbone go: into the 1x1 lateral convolutions of the FPN that reads them."""
from __future__ import annotations

from collections.abc import Iterator

from mmcv.cnn import ConvModule
from mmdet.models.backbones import SwinTransformer
from mmdet.models.detectors import FasterRCNN, MaskRCNN
from mmdet.models.necks import FPN
from torch import nn

from slab_det.backbones.swin import SLABSwin

from .folds import OUTPUT_NORM_RULES, Fold, folds_of, output_norm_of


@output_norm_of(SLABSwin, SwinTransformer)
def swin_output_norm(backbone: nn.Module, stage: int) -> Fold:
    """A norm that only outputs pass: the next stage reads what is before it."""
    return Fold(f'norm{stage}', ())


# Detectors that hand the backbone's outputs to the neck and to nothing else.
@folds_of(MaskRCNN, FasterRCNN)
def output_norm_folds(detector: nn.Module) -> Iterator[Fold]:
    backbone, neck = detector.backbone, getattr(detector, 'neck', None)
    if type(backbone) not in OUTPUT_NORM_RULES:
        return
    # Backbones return stages in their own order, whatever that of out_indices is.
    for level, stage in enumerate(sorted(backbone.out_indices)):
        fold = OUTPUT_NORM_RULES[type(backbone)](backbone, stage)
        lateral = level - getattr(neck, 'start_level', 0)
        yield Fold(f'backbone.{fold.norm}',
                   (f'neck.lateral_convs.{lateral}.conv', *(f'backbone.{target}' for target in fold.targets)),
                   obstacle=_obstacle(neck, level) or fold.obstacle)


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
