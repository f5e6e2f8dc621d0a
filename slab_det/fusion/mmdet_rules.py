"""Fold rules for what stays mmdet's: the outputs of its backbones, its patch embedding, and its FPN."""

from __future__ import annotations

from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer
from mmdet.models.backbones.swin import SwinBlock
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.layers import PatchEmbed, PatchMerging
from mmdet.models.necks import FPN, FPN_DropBlock
from mmengine.model import Sequential
from torch import nn

from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.backbones.adopt import check_two_layers
from slab_det.backbones.blocks import Block
from slab_det.norms.folds import CannotFold, Channels, Fold, Write, register_folds

# These methods hand the outputs of the backbone to the neck, and to nothing else.
EXTRACT_FEAT = (SingleStageDetector.extract_feat, TwoStageDetector.extract_feat)


def find_output_reader(model: nn.Module, backbone: str, level: int) -> str:
    """The part of the neck that alone reads output ``level`` of the module named ``backbone``.

    Raises:
        CannotFold: If something else may read the output.
    """
    owner, _, attribute = backbone.rpartition('.')
    detector = model.get_submodule(owner)
    if attribute != 'backbone' or not hasattr(detector, 'neck'):
        raise CannotFold('its output is an output of the backbone, which no neck reads')
    kind = type(detector)
    if getattr(kind, 'extract_feat', None) not in EXTRACT_FEAT or 'extract_feat' in vars(detector):
        raise CannotFold(f'extract_feat of {kind.__name__} may hand the outputs of the backbone to more than the neck')
    return f'{backbone.removesuffix("backbone")}neck[{level}]'


def _fpn_input_layers(fpn: FPN, part: str) -> tuple[str]:
    """The lateral convolution that reads an input of the FPN."""
    level, num_levels = int(part), fpn.backbone_end_level - fpn.start_level
    if not fpn.start_level <= level < fpn.backbone_end_level:
        raise CannotFold('the FPN does not read this level')
    if fpn.add_extra_convs == 'on_input' and fpn.num_outs > num_levels and level == fpn.backbone_end_level - 1:
        raise CannotFold(f'neck.fpn_convs.{num_levels} reads the same map')
    return (f'lateral_convs.{level - fpn.start_level}',)


def _fpn_writes(fpn: FPN) -> list[Write]:
    """The convolutions whose outputs are the FPN's maps of the backbone's levels, without the extra levels."""
    convs = [f'fpn_convs.{i}.conv' for i in range(fpn.backbone_end_level - fpn.start_level)]
    return [Write(conv, stream=conv) for conv in convs if isinstance(fpn.get_submodule(conv), nn.Conv2d)]


def _conv_module_input_layers(module: ConvModule) -> tuple[str]:
    if module.order[0] != 'conv' or module.with_explicit_padding or module.with_spectral_norm:
        raise CannotFold('a lateral convolution of the neck is more than one plain convolution')
    return ('conv',)


def _patch_embed_input_layers(embed: PatchEmbed) -> tuple[str]:
    if embed.adap_padding:
        raise CannotFold('the next patch embedding pads the map')
    return ('projection',)


def _ffn_channels(ffn: FFN) -> list[Channels]:
    check_two_layers(ffn)
    return [Channels('', ('layers.0.0',), ('layers.1',), ('layers.0.1',))]


def _mix_ffn_channels(ffn: MixFFN) -> list[Channels]:
    # Behind fc2 and before it there is a dropout.
    names = [f'layers.{i}' for i in range(len(ffn.layers) - 1)]
    return [Channels('', names[:1], names[-1:], names[1:-2])]


register_folds(SwinTransformer, output_folds=SLABSwin.output_folds)
register_folds(
    PyramidVisionTransformer, PyramidVisionTransformerV2, folds=SLABPVT.folds, output_folds=SLABPVT.output_folds
)
register_folds(
    PatchEmbed, folds=lambda embed: [Fold('norm', after='projection')], input_layers=_patch_embed_input_layers
)
# What adopt leaves: a merging whose stride is not its kernel, which pads the map before the norm; and a block of which
# one part is not mmdet's.
register_folds(PatchMerging, folds=lambda merging: [Fold('norm', before='reduction')])
register_folds(SwinBlock, PVTEncoderLayer, folds=Block.folds)
register_folds(SwinBlock, writes=lambda block: [Write('attn.w_msa.proj', 'norm2'), Write('ffn.layers.1')])
register_folds(
    PVTEncoderLayer,
    # The second layer of the FFN is last but one, before the dropout.
    writes=lambda block: [Write('attn.attn.out_proj', 'norm2'), Write(f'ffn.layers.{len(block.ffn.layers) - 2}')],
)
register_folds(FFN, input_layers=lambda ffn: ('layers.0.0',), hidden_channels=_ffn_channels)
register_folds(MixFFN, input_layers=lambda ffn: ('layers.0',), hidden_channels=_mix_ffn_channels)
register_folds(FPN, FPN_DropBlock, input_layers=_fpn_input_layers, writes=_fpn_writes)
# A list of necks, such as FPN and DyHead.
register_folds(nn.Sequential, Sequential, input_layers=lambda modules, part='': (f'0[{part}]' if part else '0',))
register_folds(ConvModule, input_layers=_conv_module_input_layers)
