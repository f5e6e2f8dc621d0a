"""Where the output norms of a backbone go: into the 1x1 lateral convolutions of the FPN that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from types import CodeType

from mmcv.cnn import ConvModule
from mmdet.models.backbones import SwinTransformer
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.necks import FPN
from torch import nn

from slab_det.backbones.swin import SLABSwin
from slab_det.fusion.folds import OUTPUT_NORM_RULES, Fold, folds_of_subclasses, output_norm_of


@output_norm_of(SLABSwin, SwinTransformer)
def swin_output_norm(backbone: nn.Module, stage: int) -> Fold:
    """A norm that only outputs pass: the next stage reads what is before it."""
    return Fold(f'norm{stage}', ())


# Their extract_feat hands the backbone's outputs to the neck and to nothing else.
BASES = (SingleStageDetector, TwoStageDetector)


@folds_of_subclasses(*BASES)
def output_norm_folds(detector: SingleStageDetector | TwoStageDetector) -> Iterator[Fold]:
    backbone, neck = detector.backbone, getattr(detector, 'neck', None)
    if type(backbone) not in OUTPUT_NORM_RULES:
        return
    other_reader = _find_other_reader(detector)
    # Backbones return stages in their own order, whatever that of out_indices is.
    for level, stage in enumerate(sorted(backbone.out_indices)):
        fold = OUTPUT_NORM_RULES[type(backbone)](backbone, stage)
        lateral = level - getattr(neck, 'start_level', 0)
        yield Fold(
            f'backbone.{fold.norm}',
            (f'neck.lateral_convs.{lateral}.conv', *(f'backbone.{target}' for target in fold.targets)),
            obstacle=other_reader or _find_obstacle(neck, level) or fold.obstacle,
        )


def _find_other_reader(detector: nn.Module) -> str:
    """What may read the backbone's outputs besides the neck; '' if nothing does."""
    kind = type(detector)
    if 'extract_feat' in vars(detector) or kind.extract_feat not in [base.extract_feat for base in BASES]:
        return f'{kind.__name__} has an extract_feat of its own'
    known = {ancestor for base in BASES for ancestor in base.__mro__}
    for added in (ancestor for ancestor in kind.__mro__ if ancestor not in known):
        for name, attribute in vars(added).items():
            function = getattr(attribute, 'fget', None) or getattr(attribute, '__func__', attribute)
            # A constructor only builds the backbone.
            if name != '__init__' and _names_backbone(getattr(unwrap(function), '__code__', None)):
                return f'{added.__name__}.{name} may read the backbone too'
    return ''


def _names_backbone(code: CodeType | None) -> bool:
    """Whether a function, or one defined in it, has an attribute or a string 'backbone'."""
    if code is None:
        return False
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return 'backbone' in (*code.co_names, *code.co_consts) or any(map(_names_backbone, inner))


def _find_obstacle(neck: nn.Module | None, level: int) -> str:
    """Why the output norm of this level cannot move into the neck; '' if it can."""
    if type(neck) is not FPN:
        return f'the neck is {type(neck).__name__}, not FPN'
    if not neck.start_level <= level < neck.backbone_end_level:
        return 'the FPN does not read this level'
    num_levels = neck.backbone_end_level - neck.start_level
    if neck.add_extra_convs == 'on_input' and neck.num_outs > num_levels and level == neck.backbone_end_level - 1:
        return f'neck.fpn_convs.{num_levels} reads the same map'
    lateral = neck.lateral_convs[level - neck.start_level]
    if not _is_plain_conv(lateral):
        return f'neck.lateral_convs.{level - neck.start_level} does more to its input than one convolution'
    return ''


def _is_plain_conv(module: ConvModule) -> bool:
    if type(module) is not ConvModule or module.order[0] != 'conv':
        return False
    conv = module.conv
    return (
        not module.with_explicit_padding
        and not module.with_spectral_norm
        and type(conv) is nn.Conv2d
        and conv.groups == 1
        and not any(conv.padding)
    )
