"""Small detectors with random weights, as teachers for tests of absorption."""

import copy

from conftest import PVT_V2, as_trained, build_detector_cfg
from mmdet.registry import MODELS

from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.channels.observed import Observer
from slab_det.absorption.channels.survey import Survey
from slab_det.absorption.images import read_images

# Options with which absorb removes all norms, and no channels.
NORMS_GONE = dict(channels=1, norms='remove', progress=False)
SWIN = dict(embed_dims=8, depths=(2, 1, 1, 1), num_heads=(1, 2, 2, 4), norm_cfg=dict(type='LN'))
PVT = dict(SWIN, num_layers=(1, 1, 1, 1), mlp_ratios=(2, 2, 2, 2))
del PVT['depths']
BACKBONES = {
    'SLABSwin': dict(SWIN, type='SLABSwin'),
    'SLA': dict(SWIN, type='SLABSwin', attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(10, 6, 7, 7)),
    'FFN norm': dict(SWIN, type='SLABSwin', ffn_norm='pre_act'),
    'FFN norm behind': dict(SWIN, type='SLABSwin', ffn_norm='post_act'),
    'BN+FFNBN': dict(SWIN, type='SLABSwin', ffn_norm='pre_act', norm_cfg=dict(type='TokenBN')),
    'SwinTransformer': dict(SWIN, type='SwinTransformer'),
    'SLABPVT': dict(PVT, type='SLABPVT', pretrain_img_size=64),
    'PVTv2': dict(PVT, type='SLABPVT', **PVT_V2),
    'PyramidVisionTransformer': dict(PVT, type='PyramidVisionTransformer', pretrain_img_size=64),
    'PyramidVisionTransformerV2': dict(PVT, type='PyramidVisionTransformerV2'),
}


def widen_heads(cfg):
    """Heads of 32 channels, which lose several steps of 8, and few regions, whose heads take most of the time."""
    cfg.neck.out_channels = 32
    cfg.rpn_head.update(in_channels=32, feat_channels=32)
    cfg.test_cfg.rpn.max_per_img = 50
    cfg.test_cfg.rcnn.max_per_img = 20
    heads = cfg.roi_head
    heads.bbox_roi_extractor.out_channels = 32
    heads.bbox_head.update(in_channels=32, fc_out_channels=64)
    if heads.mask_head:
        heads.mask_roi_extractor.out_channels = 32
        heads.mask_head.in_channels = 32


def build_teacher(backbone='SLABSwin', detector='mask_rcnn', wide=True, **options):
    """A detector with one of BACKBONES and random weights; its attribute cfg is its config."""
    cfg = build_detector_cfg(detector, **SWIN)
    cfg.backbone = copy.deepcopy(BACKBONES[backbone] | options)
    # A PVT stage has embed_dims channels per head.
    cfg.neck.in_channels = [8, 16, 16, 32] if 'num_layers' in cfg.backbone else [8, 16, 32, 64]
    if wide:
        widen_heads(cfg)
    model = as_trained(MODELS.build(cfg))
    model.cfg = cfg
    return model


def survey(model, images, folder):
    """The survey of an adopted teacher."""
    return Survey(Observer(model.eval(), read_images(model, images, folder, heads=True), int8=False))


def prune(survey, counts):
    """The student with these numbers of channels, with its report."""
    student = copy.deepcopy(survey.observer.model)
    student.absorption_report = AbsorptionReport()
    survey.prune(student, counts, student.absorption_report)
    return student
