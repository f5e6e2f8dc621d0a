"""The form of fixed shapes, which a CUDA graph holds, finds what mmdet finds, to the last bit."""

import os
import random

import pytest
import torch
from conftest import SMALL_SWIN
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from zoo import shrunk

from slab_det.deployment.detection import EMPTY
from slab_det.deployment.gpu.static import Frame, static_form
from slab_det.deployment.masks import paste_masks

CONFIGS = {
    'Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
    'Cascade Mask R-CNN': 'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco',
    'Cascade R-CNN': 'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco',
    'RetinaNet': 'retinanet/retinanet_r50_fpn_1x_coco',
    'RTMDet': 'rtmdet/rtmdet_l_swin_b_4xb32-100e_coco',
    'ATSS': 'atss/atss_r50_fpn_1x_coco',
    'FCOS': 'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco',
}
SIZES = ((64, 96), (75, 102), (130, 66), (33, 47), (128, 224))
# Necks that join maps by size, and GroupNorms that need more than one pixel.
MULTIPLES = ((64, 96), (96, 128), (160, 64), (128, 224))
LARGE = ((256, 192), (224, 320))
# Of each kind; SLAB_DET_FUZZ=25 makes 200 detectors.
NUM_MODELS = int(os.environ.get('SLAB_DET_FUZZ', 5))


def build(kind, rng):
    """A small detector with random weights, whose scores spread over all of their range."""
    cfg = Config.fromstring(f"_base_ = ['mmdet::{CONFIGS[kind]}.py']", '.py').model
    cfg.backbone = {**SMALL_SWIN, 'norm_cfg': dict(type='LN')}
    of_backbone = cfg.neck.in_channels
    cfg = Config(dict(model=shrunk(cfg.to_dict(), {}))).model
    cfg.backbone = {**SMALL_SWIN, 'norm_cfg': dict(type='LN')}
    cfg.neck.in_channels = [8, 16, 32, 64][-len(of_backbone) :]
    if len(of_backbone) == 3:
        cfg.backbone['out_indices'] = (1, 2, 3)
    model = MODELS.build(cfg)
    # Of eval() mmdet's Swin returns None.
    model.eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=rng.uniform(0.5, 2) * parameter[0].numel() ** -0.5)
            if name.endswith(('cls.weight', 'fc_cls.weight')):
                parameter.data *= rng.uniform(0.1, 4)
    return model


def predict(model, size, ori_shape):
    """What mmdet finds, and what the static form finds."""
    scale = (size[1] / ori_shape[1], size[0] / ori_shape[0])
    meta = dict(img_shape=size, ori_shape=ori_shape, scale_factor=scale, img_id=0, img_path='')
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    data = model.data_preprocessor(dict(inputs=[image], data_samples=[DetDataSample(metainfo=meta)]), False)
    found = static_form(model)(data['inputs'], Frame(*torch.tensor(Frame.numbers(data['data_samples'][0].metainfo))))
    return model(**data, mode='predict')[0].pred_instances, found


@pytest.mark.parametrize('kind', CONFIGS)
@torch.no_grad()
def test_it_finds_what_mmdet_finds(kind):
    rng, num_exact = random.Random(0), 0
    sizes = {'RTMDet': MULTIPLES, 'ATSS': LARGE, 'FCOS': LARGE}.get(kind, SIZES)
    for seed, size in enumerate((sizes * NUM_MODELS)[:NUM_MODELS]):
        torch.manual_seed(seed)
        ori_shape = rng.randint(20, 200), rng.randint(20, 200)
        expected, found = predict(build(kind, rng), size, ori_shape)
        if not found.exact:
            continue
        num_exact, count = num_exact + 1, int((found.scores > EMPTY).sum())
        masks = found.masks is not None and paste_masks(found.masks[:count], found.boxes[:count], ori_shape, 0.5)
        for name, values in dict(bboxes=found.boxes, scores=found.scores, labels=found.labels).items():
            assert torch.equal(values[:count], expected[name]), (seed, size, name)
        assert masks is False or torch.equal(masks, expected.masks), (seed, size)
    assert num_exact > NUM_MODELS / 2
