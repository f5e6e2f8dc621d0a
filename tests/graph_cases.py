"""Small detectors and images for the tests of CUDA graphs."""

import torch
from conftest import SMALL_SWIN
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from zoo import shrunk

CONFIGS = {
    'Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
}


def build(kind, rng):
    """A small detector with random weights, whose scores spread over their whole range."""
    cfg = Config.fromstring(f"_base_ = ['mmdet::{CONFIGS[kind]}.py']", '.py').model
    cfg.backbone = {**SMALL_SWIN, 'norm_cfg': dict(type='LN')}
    cfg = Config(dict(model=shrunk(cfg.to_dict(), {}))).model
    cfg.backbone = {**SMALL_SWIN, 'norm_cfg': dict(type='LN')}
    cfg.neck.in_channels = [8, 16, 32, 64]
    model = MODELS.build(cfg)
    # The eval() of mmdet's Swin returns None.
    model.eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=rng.uniform(0.5, 2) * parameter[0].numel() ** -0.5)
            if name.endswith(('cls.weight', 'fc_cls.weight')):
                parameter.data *= rng.uniform(0.1, 4)
    return model


def noise(size, ori_shape, count=1):
    """What a test pipeline returns for images of noise."""
    scale = (size[1] / ori_shape[1], size[0] / ori_shape[0])
    meta = dict(img_shape=size, ori_shape=ori_shape, scale_factor=scale, img_id=0, img_path='')
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for _ in range(count)]
    return dict(inputs=images, data_samples=[DetDataSample(metainfo=meta) for _ in range(count)])


@torch.no_grad()
def eager(model, data):
    """What the detector finds without graphs."""
    data = model.data_preprocessor(data, False)
    samples = type(model).predict(model, data['inputs'], data['data_samples'])
    return [sample.pred_instances.clone() for sample in samples]


@torch.no_grad()
def graphed(model, data):
    """What the detector finds, in a graph if it has one."""
    return [sample.pred_instances.clone() for sample in model.test_step(data)]


@torch.no_grad()
def is_answered(model, data):
    """Whether the graph answers for an image."""
    data = model.data_preprocessor(data, False)
    return model.predict._detect(data['inputs'], data['data_samples']) is not None


def unmatched(found, expected, boxes=1e-2, scores=1e-4):
    """The share of objects without a partner: of the same label, near in every coordinate (pixels) and in its score."""
    same = found.labels[:, None] == expected.labels
    same &= (found.scores[:, None] - expected.scores).abs() <= scores
    same &= (found.bboxes[:, None] - expected.bboxes).abs().amax(-1) <= boxes
    alone = (~same.any(1)).sum() + (~same.any(0)).sum()
    return alone.item() / max(len(found) + len(expected), 1)
