"""Fold rules for mmdet's Swin, PVT and PVTv2, and for its FPN, into which the output norms fold."""

from __future__ import annotations

import torch
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer, SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinBlock, WindowMSA
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.layers import PatchEmbed, PatchMerging
from mmdet.models.necks import FPN, FPN_DropBlock
from mmengine.model import Sequential
from torch import nn

from slab_det.attention import MapAttention, ShiftedWindowAttention, SoftmaxMapAttention, SoftmaxWindowAttention
from slab_det.fusion.folds import CannotFold, Channels, Fold, Write, register_folds

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
    kind = getattr(detector, 'student_class', type(detector))
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


def own_attention(attn: ShiftWindowMSA) -> ShiftedWindowAttention:
    """slab_det's attention with the layers, parameters and buffers of mmdet's: same results, same state-dict keys.

    mmdet pads maps between norm1 and qkv, so a padding token becomes the bias of qkv, which a fold changes. slab_det's
    attention stores the unfused bias for padding tokens.
    """
    theirs = attn.w_msa
    if type(theirs) is not WindowMSA:
        raise CannotFold(f'its attention is a {type(theirs).__name__}')
    # On the meta device no weights are initialised: every tensor comes from the original.
    with torch.device('meta'):
        w_msa = SoftmaxWindowAttention(
            theirs.embed_dims,
            theirs.num_heads,
            attn.window_size,
            attn_drop_rate=theirs.attn_drop.p,
            qk_scale=theirs.scale,
        )
        ours = ShiftedWindowAttention(w_msa, attn.shift_size, drop_path_rate=0.0)
    w_msa.relative_position_bias_table = theirs.relative_position_bias_table
    w_msa.relative_position_index = theirs.relative_position_index
    w_msa.qkv, w_msa.proj, w_msa.proj_drop = theirs.qkv, theirs.proj, theirs.proj_drop
    ours.drop = attn.drop
    ours.training, w_msa.training = attn.training, theirs.training
    return ours


def own_map_attention(attn: SpatialReductionAttention) -> MapAttention:
    """slab_det's attention with the layers of mmdet's: same results, same state-dict keys.

    mmdet never calls the output projection as a module, so :func:`slab_det.absorb` could not capture its input.
    """
    if not attn.batch_first:
        raise CannotFold('its inputs are not batch first')
    with torch.device('meta'):
        ours = SoftmaxMapAttention(attn.embed_dims, attn.num_heads, attn_drop_rate=attn.attn.dropout)
    ours.attn, ours.sr_ratio = attn.attn, attn.sr_ratio
    ours.proj_drop, ours.drop = attn.proj_drop, attn.dropout_layer
    if attn.sr_ratio > 1:
        ours.sr, ours.norm = attn.sr, attn.norm
    ours.training = attn.training
    return ours


def swin_output_folds(backbone: nn.Module) -> list[Fold]:
    """The output norms, in the order of the outputs. Inside the backbone nothing reads them."""
    return [Fold(f'norm{stage}') for stage in sorted(backbone.out_indices)]


def pvt_folds(backbone: nn.Module) -> list[Fold]:
    """The norm behind each stage of a PVT, which the next patch embedding reads."""
    last = len(backbone.layers) - 1
    return [Fold(f'layers.{i}.2', before=f'layers.{i + 1}.0' if i < last else ()) for i in range(last + 1)]


def pvt_output_folds(backbone: nn.Module) -> list[Fold]:
    """The norms whose outputs the PVT returns, in the order of the outputs."""
    folds = pvt_folds(backbone)
    return [folds[stage] for stage in sorted(backbone.out_indices)]


def _patch_embed_input_layers(embed: PatchEmbed) -> tuple[str]:
    if embed.adap_padding:
        raise CannotFold('the next patch embedding pads the map')
    return ('projection',)


def is_two_layers(ffn: FFN) -> bool:
    """Whether an FFN is ``x + fc2(act(fc1(x)))``, without LayerScale."""
    return ffn.num_fcs == 2 and ffn.add_identity and isinstance(ffn.gamma2, nn.Identity)


def _ffn_channels(ffn: FFN) -> list[Channels]:
    if not is_two_layers(ffn):
        raise CannotFold('it does not have two layers and a residual connection, or has a LayerScale')
    return [Channels('', ('layers.0.0',), ('layers.1',), ('layers.0.1',))]


def _mix_ffn_channels(ffn: MixFFN) -> list[Channels]:
    # The last two layers are fc2 and its dropout, the layer before them is a dropout.
    names = [f'layers.{i}' for i in range(len(ffn.layers) - 1)]
    return [Channels('', names[:1], names[-1:], names[1:-2])]


register_folds(
    PatchEmbed, folds=lambda embed: [Fold('norm', after='projection')], input_layers=_patch_embed_input_layers
)
register_folds(
    SwinBlock, PVTEncoderLayer, folds=lambda block: [Fold('norm1', before='attn'), Fold('norm2', before='ffn')]
)
register_folds(FFN, input_layers=lambda ffn: ('layers.0.0',), hidden_channels=_ffn_channels)

register_folds(SwinTransformer, output_folds=swin_output_folds)
register_folds(SwinBlock, writes=lambda block: [Write('attn.w_msa.proj', 'norm2'), Write('ffn.layers.1')])
register_folds(ShiftWindowMSA, input_layers=ShiftedWindowAttention.input_layers, replace=own_attention)
register_folds(WindowMSA, input_layers=SoftmaxWindowAttention.input_layers)
# The map is padded before the norm, so padding passes the norm like any token.
register_folds(PatchMerging, folds=lambda merging: [Fold('norm', before='reduction')])

register_folds(PyramidVisionTransformer, PyramidVisionTransformerV2, folds=pvt_folds, output_folds=pvt_output_folds)
register_folds(
    PVTEncoderLayer,
    # The second linear layer of the FFN is last but one, before the dropout.
    writes=lambda block: [Write('attn.attn.out_proj', 'norm2'), Write(f'ffn.layers.{len(block.ffn.layers) - 2}')],
)
register_folds(
    SpatialReductionAttention,
    folds=MapAttention.folds,
    input_layers=MapAttention.input_layers,
    replace=own_map_attention,
)
# PVTv2's depthwise convolution pads after this layer, so the padding is not affected.
register_folds(MixFFN, input_layers=lambda ffn: ('layers.0',), hidden_channels=_mix_ffn_channels)
register_folds(FPN, FPN_DropBlock, input_layers=_fpn_input_layers, writes=_fpn_writes)
# A list of necks, such as FPN and DyHead.
register_folds(nn.Sequential, Sequential, input_layers=lambda modules, part='': (f'0[{part}]' if part else '0',))
register_folds(ConvModule, input_layers=_conv_module_input_layers)
