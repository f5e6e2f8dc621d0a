"""Small detectors, images and operators on boxes for the tests of CUDA graphs."""

from itertools import accumulate

import torch
import torch.nn.functional as F
import torchvision
from conftest import SMALL_PVT, SMALL_SWIN
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from zoo import shrunk

from slab_det.families.operators import EMPTY, BoxOperators, anchors, offset_groups
from slab_det.inference.gpu import box_kernels

CONFIGS = {
    'Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
    'Cascade R-CNN': 'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco',
    'Cascade Mask R-CNN': 'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco',
    'RetinaNet': 'retinanet/retinanet_r50_fpn_1x_coco',
    'ATSS': 'atss/atss_r50_fpn_1x_coco',
    'FCOS': 'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco',
    'RTMDet': 'rtmdet/rtmdet_tiny_8xb32-300e_coco',
    'RTMDet-Ins': 'rtmdet/rtmdet-ins_tiny_8xb32-300e_coco',
}
# Detectors with queries, which a graph holds and a file does not.
QUERIES = {
    'Deformable DETR': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco',
    'DINO': 'dino/dino-4scale_r50_8xb2-12e_coco',
}
SEGMENTERS = {
    'MaskFormer': 'maskformer/maskformer_swin-l-p4-w12_64xb1-ms-300e_coco',
    'Mask2Former': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic',
}
# The last layers of heads, whose weights spread the scores.
SCORES = 'cls.weight', 'fc_cls.weight', 'centerness.weight', 'rtm_obj.weight'


def build(kind, rng, varied=False):
    """A small detector with random weights, whose scores spread over their whole range.

    With ``varied``, its settings are random too.
    """
    cfg = Config.fromstring(f"_base_ = ['mmdet::{(CONFIGS | QUERIES | SEGMENTERS)[kind]}.py']", '.py').model
    cfg = Config(dict(model=shrunk(cfg.to_dict(), {}))).model
    cfg.backbone = {**SMALL_SWIN, 'norm_cfg': dict(type='LN')}
    if 'neck' in cfg:
        cfg.neck.in_channels = [8, 16, 32, 64]
    if 'stacked_convs' in cfg.get('bbox_head', {}):
        cfg.bbox_head.stacked_convs = 1
    if 'RTMDet' in kind:
        cfg.backbone.out_indices, cfg.neck.in_channels = (1, 2, 3), [16, 32, 64]
        cfg.neck.out_channels = cfg.bbox_head.in_channels = cfg.bbox_head.feat_channels = 32
        # The small images have fewer boxes.
        cfg.test_cfg.update(nms_pre=125, max_per_img=100)
        # The neck takes multiples of 32.
        cfg.data_preprocessor.pad_size_divisor = 32
    if kind in ('ATSS', 'FCOS'):
        cfg.bbox_head.norm_cfg = dict(type='GN', num_groups=4)
    if kind in QUERIES:
        cfg.num_queries, cfg.bbox_head.embed_dims = 30, 32
    if kind in SEGMENTERS:
        cfg.panoptic_head.update(in_channels=[8, 16, 32, 64], num_queries=20)
        # Random weights are sure of nothing.
        cfg.test_cfg.update(instance_on=True, object_mask_thr=0.02, iou_thr=0.05)
    if varied and kind in QUERIES:
        vary_queries(cfg, rng)
    elif varied and kind in SEGMENTERS:
        vary_masks(cfg, rng)
    elif varied:
        vary(cfg, rng)
    model = MODELS.build(cfg)
    # The eval() of mmdet's Swin returns None.
    model.eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=rng.uniform(0.5, 2) * parameter[0].numel() ** -0.5)
            if name.endswith(SCORES):
                parameter.data *= rng.uniform(0.1, 4)
    return model


def vary(cfg, rng):
    """Changes the settings of a detector's config at random, as users do."""
    # mmdet cannot paste a mask outside of its image.
    classes, clips = rng.choice((1, 3, 10)), rng.random() < 0.7 or 'mask_head' in cfg.get('roi_head', {})
    heads = [cfg.roi_head.bbox_head] if 'roi_head' in cfg else [cfg.bbox_head]
    heads = heads[0] if isinstance(heads[0], list) else heads
    for head in heads:
        head.num_classes = classes
        head.bbox_coder = {**head.get('bbox_coder', dict(type='DistancePointBBoxCoder')), 'clip_border': clips}
    last = cfg.test_cfg.get('rcnn', cfg.test_cfg)
    last.update(score_thr=rng.choice((0.0, 0.05, 0.3)), max_per_img=rng.choice((3, 40, 300)))
    last.nms.iou_threshold = rng.uniform(0.3, 0.8)
    if 'roi_head' in cfg:
        # A product with few rows, of few proposals, may round otherwise than the same rows among others.
        cfg.test_cfg.rpn.update(nms_pre=rng.choice((60, 400)), max_per_img=rng.choice((50, 200)))
        cfg.test_cfg.rpn.min_bbox_size = rng.choice((-1, 0, 4))
        for head in heads:
            head.reg_class_agnostic = rng.random() < 0.5
        if cfg.roi_head.get('mask_head'):
            masks = cfg.roi_head.mask_head
            for head in masks if isinstance(masks, list) else [masks]:
                head.update(num_classes=classes, class_agnostic=rng.random() < 0.3)
        return
    last.update(nms_pre=rng.choice((20, 400, 2000)), min_bbox_size=rng.choice((-1, 0)))
    (head,) = heads
    if 'anchor_generator' in head and 'octave_base_scale' in head.anchor_generator:
        head.anchor_generator.update(scales_per_octave=rng.choice((1, 2)), ratios=rng.choice(([1.0], [0.5, 1.0, 2.0])))
    if head.type == 'FCOSHead':
        head.update(norm_on_bbox=rng.random() < 0.5, centerness_on_reg=rng.random() < 0.5)
    if head.type == 'RTMDetSepBNHead':
        head.update(
            type=rng.choice(('RTMDetHead', 'RTMDetSepBNHead')), with_objectness=rng.random() < 0.5, share_conv=True
        )
        if head.type == 'RTMDetHead':
            for name in ('share_conv', 'exp_on_reg', 'pred_kernel_size'):
                head.pop(name, None)
        else:
            head.exp_on_reg = rng.random() < 0.5


def vary_queries(cfg, rng):
    """Changes the settings of a detector with queries at random; the backbone may be a PVT, of other maps."""
    if rng.random() < 0.4:
        cfg.backbone, cfg.neck.in_channels = SMALL_PVT, [8, 16]
    elif rng.random() < 0.5:
        cfg.backbone.out_indices, cfg.neck.in_channels = (1, 2, 3), [16, 32, 64]
    cfg.data_preprocessor.pad_size_divisor = rng.choice((1, 32, 50))
    cfg.num_queries, cfg.bbox_head.num_classes = rng.choice((10, 40)), rng.choice((10, 80))
    cfg.test_cfg.max_per_img = rng.choice((3, 100))
    cfg.encoder.num_layers, cfg.decoder.num_layers = rng.choice((1, 2)), rng.choice((1, 2, 3))
    if cfg.type == 'DeformableDETR':
        cfg.with_box_refine, cfg.as_two_stage = rng.random() < 0.7, rng.random() < 0.5
        if cfg.as_two_stage:
            # mmdet encodes proposals for this width alone.
            for part in (cfg.encoder.layer_cfg, cfg.decoder.layer_cfg):
                for name in ('self_attn_cfg', 'cross_attn_cfg', 'ffn_cfg'):
                    part.get(name, {})['embed_dims'] = 256
            cfg.neck.out_channels, cfg.positional_encoding.num_feats, cfg.bbox_head.embed_dims = 256, 128, 256


def vary_masks(cfg, rng):
    """Changes the settings of a detector of masks at random."""
    things, stuff = rng.choice((1, 7)), rng.choice((0, 5))
    for part in (cfg.panoptic_head, cfg.panoptic_fusion_head):
        part.update(num_things_classes=things, num_stuff_classes=stuff)
    cfg.panoptic_head.loss_cls.class_weight = [1.0] * (things + stuff) + [0.1]
    cfg.panoptic_head.transformer_decoder.num_layers = rng.choice((1, 4))
    if rng.random() < 0.4:
        # A backbone of two maps; the coarser one feeds the queries.
        cfg.backbone = SMALL_PVT
        cfg.panoptic_head.in_channels = [8, 16]
        if cfg.type == 'Mask2Former':
            cfg.panoptic_head.update(strides=[4, 8], num_transformer_feat_level=1)
            cfg.panoptic_head.pixel_decoder.num_outs = 1
            cfg.panoptic_head.pixel_decoder.encoder.layer_cfg.self_attn_cfg.num_levels = 1
    cfg.data_preprocessor.pad_size_divisor = rng.choice((1, 32))
    cfg.test_cfg.update(
        panoptic_on=rng.random() < 0.5, max_per_image=rng.choice((3, 20)), filter_low_score=rng.random() < 0.5
    )


def noise(size, ori_shape, count=1):
    """Images of noise, as a test pipeline returns them."""
    scale = (size[1] / ori_shape[1], size[0] / ori_shape[0])
    meta = dict(img_shape=size, ori_shape=ori_shape, scale_factor=scale, img_id=0, img_path='')
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for _ in range(count)]
    return dict(inputs=images, data_samples=[DetDataSample(metainfo=meta) for _ in range(count)])


@torch.no_grad()
def eager(model, data):
    """Detections without graphs, by ``predict`` of the class."""
    data = model.data_preprocessor(data, False)
    samples = type(model).predict(model, data['inputs'], data['data_samples'])
    return [sample.pred_instances.clone() for sample in samples]


@torch.no_grad()
def graphed(model, data):
    """Detections of the model as it is, from a graph if it has one."""
    return [sample.pred_instances.clone() for sample in model.test_step(data)]


@torch.no_grad()
def is_answered_by_graph(model, data):
    """Whether a graph, not ``predict`` of the class, makes the detections."""
    data = model.data_preprocessor(data, False)
    return model.predict._detect(data['inputs'], data['data_samples'][0].metainfo) is not None


def unmatched(found, expected, boxes=1e-2, scores=1e-4):
    """Share of objects without a partner, which has the same label, near coordinates (pixels) and a near score."""
    same = found.labels[:, None] == expected.labels
    same &= (found.scores[:, None] - expected.scores).abs() <= scores
    same &= (found.bboxes[:, None] - expected.bboxes).abs().amax(-1) <= boxes
    alone = (~same.any(1)).sum() + (~same.any(0)).sum()
    return alone.item() / max(len(found) + len(expected), 1)


class EagerOperators(BoxOperators):
    """Reference of FixedOperators: the operators that mmdet uses on a CPU, equal to mmdet bit for bit."""

    def priors(self, generator, sizes, like):
        return anchors(generator, tuple(sizes), like.device)

    def topk(self, levels, count):
        sizes = [len(level) for level in levels]
        count = min(count, max(sizes)) if count > 0 else max(sizes)
        ranked = [rank(level.sigmoid(), count, like_head=True) for level in levels]
        scores, index = (torch.stack(column) for column in zip(*ranked, strict=True))
        starts = scores.new_tensor([0, *accumulate(sizes)][:-1], dtype=torch.int64)
        return scores, index + starts[:, None], torch.zeros_like(index) + torch.arange(len(levels))[:, None].to(index)

    def topk_above(self, levels, count, score_thr):
        sizes, ranked = [len(level) for level in levels], []
        for start, level in zip(accumulate([0, *sizes]), levels, strict=False):
            found = (level > score_thr).nonzero()[:, 0]
            # Not stable, as in mmdet's filter_scores_and_topk.
            scores, order = level[found].sort(descending=True)
            missing = max(min(count, len(level)) - len(found), 0)
            ranked.append(
                (F.pad(scores[:count], (0, missing), value=EMPTY), start + F.pad(found[order[:count]], (0, missing)))
            )
        return tuple(torch.cat(column) for column in zip(*ranked, strict=True))

    def candidates(self, scores, corners):
        count = min(box_kernels.CANDIDATES, len(scores))
        best, index = rank(scores, count)
        return corners[index], best, index, self.stride(corners, scores), (scores > EMPTY).sum() <= count

    def suppress(self, corners, scores, groups, stride, iou_threshold, limit):
        limit = min(limit, scores.numel()) if limit > 0 else scores.numel()
        moved, kept = offset_groups(corners, scores, groups, stride), torch.full_like(scores, EMPTY)
        for group in range(len(scores)):
            there = (scores[group] != EMPTY).nonzero()[:, 0]
            # The boxes are in descending order, which stable sorting keeps.
            index = there[torchvision.ops.nms(moved[group, there], scores[group, there], iou_threshold)]
            kept[group, index] = scores[group, index]
        return rank(kept.flatten(), limit)

    def pool(self, extractor, features, boxes, scores):
        boxes = torch.where((scores > EMPTY)[:, None], boxes, 0.0)
        return extractor(features[: len(extractor.roi_layers)], F.pad(boxes, (1, 0))), None


def rank(scores, count, like_head=False):
    """The ``count`` best scores and their indices; missing scores are ``EMPTY``.

    Equal scores keep the order of their indices, as in NMS. With ``like_head`` and more than ``count`` scores, equal
    scores have the order of mmdet's heads.
    """
    found = (scores != EMPTY).nonzero()[:, 0]
    scores, order = scores[found].sort(descending=True, stable=not like_head or len(found) <= count)
    missing = max(count - len(found), 0)
    return F.pad(scores[:count], (0, missing), value=EMPTY), F.pad(found[order[:count]], (0, missing))
