"""Every kind of detector that mmdet has configs for with a Swin, PVT or PVTv2 goes through fuse and absorb."""

import pytest
import torch
from conftest import CONFIGS, make_affine, randomize
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from torch import nn

import slab_det
from slab_det.absorption import absorb
from slab_det.checkpoints.build import build_detector
from slab_det.fusion import save_fused


def outputs(reason, *stages):
    return {f'norm{stage}': reason for stage in stages}


TUNE = Config.fromfile(CONFIGS / '_base_/schedules/tune_absorbed.py')
ON_INPUT = 'neck.fpn_convs.3 reads the same map'
NO_NECK = 'which no neck reads'
MAY_READ = 'may read the outputs of its backbone outside its neck'
PADDED = 'only into a convolution with groups=1 and padding=0'
# One config for each detector, neck and choice of outputs in mmdet 3.5.1, and what stays of its backbone, with a part
# of the reason. FCOS of v3det is missing: its config names an option that no FPN of mmdet has.
ZOO = {
    'swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco': {},
    'swin/retinanet_swin-t-p4-w7_fpn_1x_coco': outputs(ON_INPUT, 3),
    'v3det/faster_rcnn_swinb_fpn_8x4_sample1e-3_mstrain_v3det_2x': {},
    'v3det/cascade_rcnn_swinb_fpn_8x4_sample1e-3_mstrain_v3det_2x': {},
    'dyhead/atss_swin-l-p4-w12_fpn_dyhead_ms-2x_coco': {},
    'glip/glip_atss_swin-t_a_fpn_dyhead_pretrain_obj365': {},
    'glip/glip_atss_swin-t_a_fpn_dyhead_16xb2_ms-2x_funtune_coco': {},
    'rtmdet/rtmdet_l_swin_b_4xb32-100e_coco': outputs('neck is a CSPNeXtPAFPN', 1, 2, 3),
    'rtmdet/rtmdet_l_swin_b_p6_4xb16-100e_coco': outputs('neck is a CSPNeXtPAFPN', 1, 2, 3, 4),
    'v3det/deformable-detr-refine-twostage_swin_16xb2_sample1e-3_v3det_50e': outputs(MAY_READ, 1, 2, 3),
    'v3det/dino-4scale_swin_16xb1_sample1e-3_v3det_36e': outputs(MAY_READ, 1, 2, 3),
    'dino/dino-5scale_swin-l_8xb2-12e_coco': outputs(MAY_READ, 0, 1, 2, 3),
    'ddq/ddq-detr-4scale_swinl_8xb2-30e_coco': outputs(MAY_READ, 1, 2, 3),
    'grounding_dino/grounding_dino_swin-t_finetune_16xb2_1x_coco': outputs(MAY_READ, 1, 2, 3),
    'mm_grounding_dino/grounding_dino_swin-l_pretrain_all': outputs(MAY_READ, 0, 1, 2, 3),
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
    """In the place of BERT, which is downloaded when it is built; no feature map depends on it."""

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


def feature_maps(model, image):
    # A video detector has no such method.
    return getattr(model, 'extract_feat', model.backbone)(image)


@pytest.mark.parametrize('name', ZOO)
@torch.no_grad()
def test_zoo_detector_fuses_exactly_and_says_what_stays(name):
    model = build_detector(Config(dict(model=zoo_cfg(name))))
    slab_det.convert_norms(model.backbone, dict(type='RepBN'), inplace=True)
    model = randomize(model).double().eval()
    fused = slab_det.fuse(model)
    left = {fate.norm: fate.reason for fate in fused.fusion_report.select('affine')}
    left = {norm.removeprefix('backbone.'): reason for norm, reason in left.items()}
    assert left.keys() == ZOO[name].keys(), left
    assert all(reason in left[norm] for norm, reason in ZOO[name].items()), left
    image = torch.randn(1, 3, *((64, 128) if 'rtmdet' in name else (75, 101))).double()
    for one, other in zip(feature_maps(fused, image), feature_maps(model, image), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * other.abs().max().item())


@pytest.mark.parametrize('name', ZOO)
@torch.no_grad()
def test_zoo_detector_goes_through_absorb(name, tmp_path):
    """LayerNorms of a large eps are affine: then every map but those of padded borders is the teacher's to rounding."""
    cfg = zoo_cfg(name)
    model = randomize(build_detector(Config(dict(model=cfg))), 0).double()
    make_affine(model.backbone)
    student = absorb(model, [torch.randn(1, 3, 58, 70).double() for _ in range(2)], keep=0, progress=False)
    report = student.absorption_report
    kept = {norm.norm.removeprefix('backbone.'): norm.reason for norm in report.kept if 'backbone.' in norm.norm}
    assert kept.keys() == ZOO[name].keys(), kept
    assert all(reason in kept[norm] for norm, reason in ZOO[name].items()), kept
    assert all(norm.reason == 'it is not in the backbone' for norm in report.kept if 'backbone.' not in norm.norm)
    # RTMDet's neck doubles maps, and asks for sides that halve.
    image = torch.randn(1, 3, *((64, 128) if 'rtmdet' in name else (75, 101))).double()
    maps = feature_maps(student, image)
    for one, other in zip(feature_maps(model, image), maps, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    heads = {key: value for key, value in student.state_dict().items() if not key.startswith(('backbone.', 'neck.'))}
    assert heads and all(torch.equal(value, model.state_dict()[key]) for key, value in heads.items())
    checkpoint, config = save_fused(student, Config(dict(model=cfg)), tmp_path / 'fused.pth')
    rebuilt = build_detector(Config.fromfile(config), str(checkpoint)).double()
    for norm in rebuilt.backbone.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.eps = 1e12
    for one, other in zip(maps, feature_maps(rebuilt, image), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # Each parameter is tuned, and once, also where heads share layers.
    groups = build_optim_wrapper(rebuilt, TUNE.optim_wrapper).optimizer.param_groups
    assert sum(len(group['params']) for group in groups) == len({*rebuilt.parameters()})
