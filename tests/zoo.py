"""Every kind of detector that mmdet has configs for with a Swin, PVT or PVTv2, in a small form."""

from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn


def outputs(reason, *stages):
    return {f'norm{stage}': reason for stage in stages}


ON_INPUT = 'neck.fpn_convs.3 reads the same map'
NO_NECK = 'which no neck reads'
MAY_READ = 'may hand the outputs of the backbone to more than the neck'
PADDED = 'only into a convolution with groups=1 and padding=0'
# One config for each detector and neck in mmdet 3.5.1, and the norms that stay in its backbone, with a part of the
# reason. FCOS of v3det is missing: its config names an option that no FPN of mmdet has.
ZOO = {
    'swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco': {},
    'swin/retinanet_swin-t-p4-w7_fpn_1x_coco': outputs(ON_INPUT, 3),
    'v3det/cascade_rcnn_swinb_fpn_8x4_sample1e-3_mstrain_v3det_2x': {},
    'dyhead/atss_swin-l-p4-w12_fpn_dyhead_ms-2x_coco': {},
    'glip/glip_atss_swin-t_a_fpn_dyhead_pretrain_obj365': {},
    'rtmdet/rtmdet_l_swin_b_4xb32-100e_coco': outputs('neck is a CSPNeXtPAFPN', 1, 2, 3),
    'v3det/deformable-detr-refine-twostage_swin_16xb2_sample1e-3_v3det_50e': outputs(MAY_READ, 1, 2, 3),
    'dino/dino-5scale_swin-l_8xb2-12e_coco': outputs(MAY_READ, 0, 1, 2, 3),
    'ddq/ddq-detr-4scale_swinl_8xb2-30e_coco': outputs(MAY_READ, 1, 2, 3),
    'grounding_dino/grounding_dino_swin-t_finetune_16xb2_1x_coco': outputs(MAY_READ, 1, 2, 3),
    'mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco': outputs(NO_NECK, 0, 1, 2, 3),
    'mask2former_vis/mask2former_swin-l-p4-w12-384-in21k_8xb2-8e_youtubevis2021': outputs(NO_NECK, 0, 1, 2, 3),
    'maskformer/maskformer_swin-l-p4-w12_64xb1-ms-300e_coco': outputs(NO_NECK, 0, 1, 2, 3),
    'pvt/retinanet_pvt-t_fpn_1x_coco': {},
    'pvt/retinanet_pvtv2-b0_fpn_1x_coco': {
        'layers.0.2': 'the FPN does not read this level',
        'layers.1.2': PADDED,
        'layers.2.2': PADDED,
        'layers.3.2': ON_INPUT,
    },
}


# Numbers of layers, of checkpointed layers and of channel groups, wherever they stand.
SMALL = dict(num_layers=1, num_cp=0, num_groups=4)


@MODELS.register_module()
class Wordless(nn.Module):
    """Replaces BERT, which is downloaded when it is built; no feature map depends on it."""

    def __init__(self):
        super().__init__()
        self.language_backbone = nn.Module()
        self.language_backbone.body = nn.Module()
        self.language_backbone.body.language_dim = 8


def shrunk(cfg, channels):
    """A config with an eighth of every large number, and with necks and heads that read a backbone's new channels."""
    if isinstance(cfg, dict):
        small = {}
        for key, value in cfg.items():
            of_backbone = isinstance(value, (list, tuple)) and {*map(str, value)} <= {*map(str, channels)}
            if key == 'in_channels' and of_backbone:
                small[key] = [channels[count] for count in value]
            else:
                small[key] = SMALL[key] if type(value) is int and key in SMALL else shrunk(value, channels)
        return small
    if isinstance(cfg, (list, tuple)):
        return type(cfg)(shrunk(value, channels) for value in cfg)
    return cfg // 8 if type(cfg) is int and cfg >= 128 else cfg


def zoo_cfg(name):
    """The small form of one of mmdet's configs: a few channels, one or two blocks in each stage."""
    cfg = Config.fromstring(f"_base_ = ['mmdet::{name}.py']", '.py').model
    backbone = cfg.backbone
    if backbone.type == 'SwinTransformer':
        stages, ratios = len(backbone.depths), [2**stage for stage in range(len(backbone.depths))]
        backbone.depths = [2] + [1] * (stages - 1)
        backbone.num_heads = ratios
    else:
        ratios = [1, 2, 5, 8]
        backbone.num_layers = [1, 1, 1, 1]
    channels = {backbone.get('embed_dims', 64) * ratio: 8 * ratio for ratio in ratios}
    backbone.embed_dims = 8
    cfg = Config(dict(model=shrunk(cfg.to_dict(), channels))).model
    if isinstance(cfg.neck if 'neck' in cfg else None, list):
        # DyHead, behind the FPN, convolves with an operator that mmcv has to compile.
        cfg.neck = cfg.neck[:1]
    if 'language_model' in cfg:
        cfg.language_model = dict(type='Wordless')
    if cfg.type == 'GLIP':
        # GLIP's own head asks for the package transformers.
        cfg.bbox_head = dict(type='ATSSHead', num_classes=3, in_channels=32, feat_channels=32)
    return cfg
