"""What reads the outputs of a backbone: the 1x1 lateral convolutions of the FPN of known detectors."""

from __future__ import annotations

from mmcv.cnn import ConvModule
from mmdet.models import detectors
from mmdet.models.necks import FPN
from torch import nn

from slab_det.fusion.folds import CannotFold, register_folds

# Their extract_feat, that of Single- or TwoStageDetector, hands the outputs of the backbone to the neck, and nothing
# else in mmdet 3.5.1 reads these outputs. Exact classes: a subclass may.
DETECTORS = tuple(
    getattr(detectors, name)
    for name in (
        'ATSS AutoAssign CascadeRCNN CenterNet CrowdDet DDOD FCOS FOVEA FSAF FastRCNN FasterRCNN GFL GLIP GridRCNN '
        'HybridTaskCascade MaskRCNN MaskScoringRCNN NASFCOS PAA PanopticFPN PointRend QueryInst RPN RTMDet '
        'RepPointsDetector RetinaNet SCNet SingleStageDetector SparseRCNN TOOD TwoStageDetector '
        'TwoStagePanopticSegmentor VFNet YOLOF YOLOX'
    ).split()
)


def find_output_reader(model: nn.Module, backbone: str, level: int, fold_outputs: bool) -> str:
    """The part of the neck that alone reads an output of a backbone.

    Args:
        model: The detector, or something that contains detectors.
        backbone: Name of the backbone in ``model``.
        level: Which of the backbone's outputs.
        fold_outputs: Trust detectors of any class; see :func:`slab_det.fuse`.

    Raises:
        CannotFold: If something else may read the output.
    """
    owner, _, attribute = backbone.rpartition('.')
    detector = model.get_submodule(owner)
    if attribute != 'backbone' or not hasattr(detector, 'neck'):
        raise CannotFold('it is an output of the backbone, which no neck reads')
    if not fold_outputs and (type(detector) not in DETECTORS or 'extract_feat' in vars(detector)):
        raise CannotFold(
            f'{type(detector).__name__} may read the outputs of its backbone outside its neck; '
            'if it does not, fuse with fold_outputs=True'
        )
    return f'{backbone.removesuffix("backbone")}neck[{level}]'


def _fpn_input_layers(fpn: FPN, part: str) -> tuple[str]:
    """The lateral convolution that reads an input of the FPN."""
    level, num_levels = int(part), fpn.backbone_end_level - fpn.start_level
    if not fpn.start_level <= level < fpn.backbone_end_level:
        raise CannotFold('the FPN does not read this level')
    if fpn.add_extra_convs == 'on_input' and fpn.num_outs > num_levels and level == fpn.backbone_end_level - 1:
        raise CannotFold(f'neck.fpn_convs.{num_levels} reads the same map')
    return (f'lateral_convs.{level - fpn.start_level}',)


def _conv_module_input_layers(module: ConvModule) -> tuple[str]:
    if module.order[0] != 'conv' or module.with_explicit_padding or module.with_spectral_norm:
        raise CannotFold('a lateral convolution of the neck does more to its input than one convolution')
    return ('conv',)


register_folds(FPN, input_layers=_fpn_input_layers)
register_folds(ConvModule, input_layers=_conv_module_input_layers)
