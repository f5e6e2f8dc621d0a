"""Family.run, the function in a CUDA graph, finds what mmdet finds, bit for bit, or refuses with the reason."""

import copy
import os
import random

import pytest
import torch
from graph_cases import CONFIGS, QUERIES, SEGMENTERS, EagerOperators, build, noise

from slab_det.backbones.adopt import replace_layers
from slab_det.families import Unsupported
from slab_det.families.deformable import deployed_deformable
from slab_det.families.masks import enlarge_masks, paste_masks
from slab_det.inference.gpu.graph import make_family, measure_frame

SIZES = ((64, 96), (75, 102), (130, 66), (33, 47), (128, 224))
# Number of detectors of each kind; SLAB_DET_FUZZ=25 makes 200.
NUM_MODELS = int(os.environ.get('SLAB_DET_FUZZ', 5))


@pytest.mark.parametrize('kind', [*CONFIGS, *QUERIES])
@torch.no_grad()
def test_a_family_of_fixed_shapes_finds_what_mmdet_finds(kind):
    rng, num_exact = random.Random(0), 0
    for seed, size in enumerate((SIZES * NUM_MODELS)[:NUM_MODELS]):
        torch.manual_seed(seed)
        ori_shape, model = (rng.randint(20, 200), rng.randint(20, 200)), build(kind, rng, varied=seed > 0)
        data = model.data_preprocessor(noise(size, ori_shape), False)
        frame = measure_frame(data['data_samples'][0].metainfo)
        static = copy.deepcopy(model)
        replace_layers(static, deployed_deformable)
        (count, exact), *found = make_family(static, EagerOperators()).run(data['inputs'], frame)
        if not exact:
            continue
        num_exact += 1
        expected = model(**data, mode='predict')[0].pred_instances
        found = dict(zip(('bboxes', 'scores', 'labels', 'masks'), (x[:count] for x in found), strict=False))
        if kind == 'RTMDet-Ins':
            scale = data['data_samples'][0].scale_factor
            found['masks'] = enlarge_masks(found['masks'], 8, scale, ori_shape, 0.5)
        elif 'masks' in found:
            found['masks'] = paste_masks(found['masks'], found['bboxes'], ori_shape, 0.5)
        # mmdet keeps what RTMDet-Ins draws masks with.
        assert found.keys() == {*expected.keys()} - {'kernels', 'priors'}
        for name, values in found.items():
            assert torch.equal(values, expected[name]), (seed, size, name)
    assert num_exact > NUM_MODELS / 2


@pytest.mark.parametrize('kind', SEGMENTERS)
@torch.no_grad()
def test_a_family_of_fixed_shapes_finds_the_masks_that_mmdet_finds(kind):
    rng, num_segments = random.Random(0), 0
    for seed, size in enumerate((SIZES * NUM_MODELS)[:NUM_MODELS]):
        torch.manual_seed(seed)
        ori_shape, model = (rng.randint(20, 200), rng.randint(20, 200)), build(kind, rng, varied=seed > 0)
        data = model.data_preprocessor(noise(size, ori_shape), False)
        (sample,) = copy.deepcopy(data['data_samples'])
        static = copy.deepcopy(model)
        replace_layers(static, deployed_deformable)
        family = make_family(static, EagerOperators())
        computed = family.run(data['inputs'], measure_frame(sample.metainfo))
        (found,) = model.add_pred_to_datasample([sample], [family.predict(computed, sample.metainfo, None)])
        (expected,) = model(**data, mode='predict')
        assert found.keys() == expected.keys(), seed
        for name, values in expected.pred_instances.items():
            assert torch.equal(found.pred_instances[name], values), (seed, size, name)
        if 'pred_panoptic_seg' in expected:
            segments = expected.pred_panoptic_seg.sem_seg
            assert torch.equal(found.pred_panoptic_seg.sem_seg, segments), (seed, size)
            num_segments += len(segments.unique())
    assert num_segments > NUM_MODELS


def subclass(part, **methods):
    """Gives a part of a detector a subclass with these methods."""
    part.__class__ = type('Other' + type(part).__name__, (type(part),), methods)


def other(*arguments, **options):
    raise AssertionError('not called')


@pytest.mark.parametrize(
    ('kind', 'change', 'reason'),
    [
        ('ATSS', lambda m: subclass(m.bbox_head, _bbox_post_process=other), 'ATSSHead as bbox_head, not OtherATSSHead'),
        ('ATSS', lambda m: subclass(m.bbox_head, forward_single=other), 'ATSSHead as bbox_head, not OtherATSSHead'),
        ('FCOS', lambda m: subclass(m.bbox_head, forward=other), 'FCOSHead as bbox_head, not OtherFCOSHead'),
        ('RTMDet', lambda m: subclass(m.bbox_head, forward=other), 'RTMDetSepBNHead as bbox_head, not OtherRTMDet'),
        ('RTMDet', lambda m: subclass(m.bbox_head.bbox_coder, decode=other), 'DistancePointBBoxCoder as bbox_coder'),
        ('FCOS', lambda m: setattr(m.bbox_head, 'use_sigmoid_cls', False), 'a bbox_head with sigmoid scores'),
        ('ATSS', lambda m: setattr(m.bbox_head.bbox_coder, 'use_box_type', True), 'boxes as tensors, without use_box'),
        ('RTMDet-Ins', lambda m: subclass(m.bbox_head, parse_dynamic_params=other), 'RTMDetInsSepBNHead as bbox_head'),
        ('RTMDet', lambda m: m.bbox_head.test_cfg.nms.update(type='soft_nms'), 'plain NMS per class'),
        ('Cascade R-CNN', lambda m: subclass(m.roi_head, _refine_roi=other), 'CascadeRoIHead as roi_head, not Other'),
        ('Cascade R-CNN', lambda m: subclass(m.roi_head.bbox_head[1], regress_by_class=other), 'BBoxHead as bbox_head'),
        (
            'Cascade R-CNN',
            lambda m: setattr(m.roi_head.bbox_head[0], 'num_classes', 7),
            'of equal num_classes',
        ),
        (
            'Cascade R-CNN',
            lambda m: setattr(m.roi_head.bbox_head[2].bbox_coder, 'add_ctr_clamp', True),
            'add_ctr_clamp',
        ),
        ('Cascade Mask R-CNN', lambda m: subclass(m.roi_head.mask_head[1], predict_by_feat=other), 'as mask_head'),
        ('Cascade Mask R-CNN', lambda m: subclass(m.roi_head, predict_mask=other), 'CascadeRoIHead as roi_head, not'),
        ('DINO', lambda m: subclass(m, pre_decoder=other), 'DINO as detector, not OtherDINO'),
        (
            'DINO',
            lambda m: subclass(m.bbox_head, _predict_by_feat_single=other),
            'DINOHead as bbox_head, not OtherDINO',
        ),
        ('DINO', lambda m: setattr(m.bbox_head.loss_cls, 'use_sigmoid', False), 'a bbox_head with sigmoid scores'),
        (
            'MaskFormer',
            lambda m: subclass(m.panoptic_head, forward=other),
            'MaskFormerHead as panoptic_head, not Other',
        ),
        ('MaskFormer', lambda m: subclass(m.panoptic_head.pixel_decoder, forward=other), 'PixelDecoder as pixel_dec'),
        ('MaskFormer', lambda m: subclass(m.panoptic_fusion_head, instance_postprocess=other), 'MaskFormerFusionHead'),
        ('Mask2Former', lambda m: subclass(m.panoptic_head, _forward_head=other), 'Mask2FormerHead as panoptic_head'),
        ('Mask2Former', lambda m: subclass(m.panoptic_head.pixel_decoder), "mmdet's own MSDeformAttnPixelDecoder"),
        (
            'Deformable DETR',
            lambda m: subclass(m.encoder.layers[0].self_attn, forward=other),
            'own MultiScaleDeformableAttention',
        ),
    ],
)
def test_a_head_that_computes_something_else_is_refused(kind, change, reason):
    model = build(kind, random.Random(0))
    replace_layers(model, deployed_deformable)
    make_family(model, EagerOperators())
    change(model)
    with pytest.raises(Unsupported, match=reason):
        make_family(model, EagerOperators())
