"""Masks as COCO RLE equal the masks of mmdet and pycocotools to the last byte, in the memory of one mask."""

from __future__ import annotations

import copy
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL_SWIN, find_objects, small_mmdet_cfg
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import encode_mask_results
from mmengine.config import Config
from mmengine.structures import InstanceData
from pycocotools import mask as coco_mask
from torch import nn

import slab_det
from slab_det.common.errors import DeploymentError, ExportError
from slab_det.compare.detections import detect
from slab_det.export import ExportedDetector, export_onnx
from slab_det.families import masks
from slab_det.families.masks import paste_masks

SIZE = (60, 90)
BOXES = {
    'inside': [[10, 20, 40, 50], [10.3, 20.7, 40.2, 21.1], [0, 0, 90, 60], [0, 0, 5, 60], [80, 5, 90, 60]],
    'partly outside': [[-30, 10, 20, 80], [70, -20, 120, 30], [-10, -10, 100, 70], [-200, 3, 300, 9]],
    'without width or height': [[30, 10, 30, 40], [30, 10, 60, 10], [5, 5, 5, 5], [30.5, 10.5, 30.5, 40]],
    'at the corners of the image': [[89, 59, 90, 60], [90, 60, 90, 60], [0, 0, 1, 1], [0, 0, 0, 0]],
    'none': [],
}


class OtherMaskHead(FCNMaskHead):
    def _predict_by_feat_single(self, *args, **options):
        return super()._predict_by_feat_single(*args, **options).flip(1)


def random_logits(count: int, seed: int = 0) -> torch.Tensor:
    """Logits of masks with blobs; the first mask is full."""
    coarse = torch.randn(count, 1, 7, 7, generator=torch.Generator().manual_seed(seed)) * 4
    logits = nn.functional.interpolate(coarse, size=28, mode='bicubic')[:, 0]
    logits[:1] = 20
    return logits


@pytest.mark.parametrize(('band', 'threshold'), [(7, 0.2), (500, 0.5), (masks.BAND, 0.5)])
@pytest.mark.parametrize('kind', BOXES)
def test_masks_equal_mmdet_and_pycocotools(kind, threshold, band, monkeypatch):
    monkeypatch.setattr(masks, 'BAND', band)
    boxes = torch.tensor(BOXES[kind], dtype=torch.float32).view(-1, 4)
    logits = random_logits(len(boxes))
    wanted = torch.zeros(0, *SIZE, dtype=torch.bool)
    if len(boxes):
        results = [InstanceData(bboxes=boxes.clone(), labels=torch.zeros(len(boxes), dtype=torch.long))]
        metas = [dict(scale_factor=(1.0, 1.0), ori_shape=SIZE)]
        head, cfg = FCNMaskHead(num_convs=0, num_classes=1), SimpleNamespace(mask_thr_binary=threshold)
        wanted = head.predict_by_feat((logits[:, None],), results, metas, cfg, rescale=True)[0].masks
    found = paste_masks(logits.sigmoid(), boxes, SIZE, threshold)
    assert found.dtype == torch.bool and found.equal(wanted) and bool(len(boxes)) == bool(found.any())
    assert paste_masks(logits.sigmoid(), boxes, SIZE, threshold, 'rle') == encode_mask_results(wanted.numpy())


def test_boxes_outside_the_image_have_no_pixels():
    boxes = torch.tensor(
        [[-50, 10, -10, 40], [100, 10, 140, 40], [10, -50, 40, -10], [10, 80, 40, 99], [91, 61, 92, 62]]
    )
    probabilities = torch.ones(len(boxes), 28, 28)
    assert not paste_masks(probabilities, boxes.float(), SIZE, 0.5).any()
    (empty,) = encode_mask_results(torch.zeros(1, *SIZE).numpy())
    assert paste_masks(probabilities, boxes.float(), SIZE, 0.5, 'rle') == [empty] * len(boxes)


def test_one_mask_at_a_time_is_in_memory():
    shape, count = (4000, 8000), 20
    boxes = torch.tensor([[0.0, 0, 8000, 4000]] + [[5000.0, 2000, 8000, 4000]] * (count - 1))
    probabilities = random_logits(count).sigmoid()
    fork = multiprocessing.get_context('fork')
    receiver, sender = fork.Pipe(duplex=False)

    def run() -> None:
        pages = int(Path('/proc/self/statm').read_text().split()[0])
        # The process may allocate two masks.
        limit = pages * resource.getpagesize() + 2 * shape[0] * shape[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        found = paste_masks(probabilities, boxes, shape, 0.5, 'rle')
        sender.send([coco_mask.area(mask) for mask in found])
        try:
            paste_masks(probabilities, boxes, shape, 0.5, 'full')
        except RuntimeError as error:
            sender.send(str(error))

    process = fork.Process(target=run)
    process.start()
    process.join()
    sender.close()
    areas = receiver.recv()
    assert len(areas) == count and min(areas) > 0
    assert 'allocate' in receiver.recv()


@pytest.fixture
def detector(small_detector: Callable[..., nn.Module]) -> nn.Module:
    """A small Mask R-CNN that finds objects in noise."""
    model = find_objects(slab_det.fuse(small_detector(seed=1)))
    model.rpn_head.test_cfg.update(nms_pre=60, max_per_img=40)
    model.roi_head.test_cfg.max_per_img = 20
    return model


@torch.no_grad()
def test_detections_are_the_same_for_full_and_rle_masks(detector):
    images = torch.randn(1, 3, 96, 128)
    (full,), (encoded,) = (detect(slab_det.deploy(detector, masks=each), [images]) for each in masks.MASK_FORMATS)
    assert len(full.scores) > 5 and full.regions == encoded.regions


@torch.no_grad()
@pytest.mark.parametrize(
    ('name', 'rescale'), [('mask', True), ('mask', False), ('cascade', True), ('class-agnostic', True)]
)
def test_rle_masks_of_deployed_detectors_equal_their_full_masks(name, rescale, detector):
    if name == 'cascade':
        backbone = SMALL_SWIN | dict(norm_cfg=dict(type='LN'))
        cfg = small_mmdet_cfg('cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco', backbone)
        cfg.roi_head.mask_head.num_classes = 3
        cfg.test_cfg.rcnn.update(score_thr=0.0, max_per_img=20)
        detector = MODELS.build(cfg).eval()
    elif name == 'class-agnostic':
        head = detector.roi_head.mask_head
        head.class_agnostic, head.conv_logits = True, nn.Conv2d(head.conv_logits.in_channels, 1, 1).eval()
    full, encoding = slab_det.deploy(detector), slab_det.deploy(detector, masks='rle')
    images = torch.randint(0, 256, (2, 3, 96, 128), dtype=torch.uint8)
    metainfo = dict(img_shape=(96, 128), ori_shape=(150, 190), scale_factor=(128 / 190, 96 / 150))
    wanted, found = [], []
    for model, results in ((full, wanted), (encoding, found)):
        data = dict(inputs=[*images], data_samples=[DetDataSample(metainfo=metainfo) for _ in images])
        data = model.data_preprocessor(data)
        results += model.predict(data['inputs'], data['data_samples'], rescale=rescale)
    for one, other in zip(wanted, found, strict=True):
        one, other = one.pred_instances, other.pred_instances
        assert len(one) > 5 and one.bboxes.equal(other.bboxes) and one.scores.equal(other.scores)
        assert one.masks.shape[1:] == ((150, 190) if rescale else (96, 128)) and one.masks.any()
        assert other.masks == encode_mask_results(one.masks.numpy())


@torch.no_grad()
def test_image_without_objects_has_an_empty_list_of_masks(detector):
    encoding = slab_det.deploy(detector, masks='rle')
    features = encoding.extract_feat(torch.randn(2, 3, 96, 128))
    metas = [dict(img_shape=(96, 128), ori_shape=(96, 128), scale_factor=(1.0, 1.0))] * 2
    for counts in ((0, 0), (0, 2)):
        results = [
            InstanceData(bboxes=torch.rand(n, 4).cumsum(1) * 30, scores=torch.rand(n), labels=torch.zeros(n).long())
            for n in counts
        ]
        found = encoding.roi_head.predict_mask(features, metas, results, rescale=True)
        assert [len(one.masks) for one in found] == [*counts] and all(type(one.masks) is list for one in found)


def test_detector_without_masks_of_fcn_mask_head_refuses_rle(detector, small_detector, tmp_path):
    boxes_alone = slab_det.fuse(small_detector('faster_rcnn', depths=(1, 1, 1, 1)))
    cfg = Config.fromstring("_base_ = ['mmdet::rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py']", '.py').model
    other_head = copy.deepcopy(detector)
    other_head.roi_head.mask_head.__class__ = OtherMaskHead
    for model, form, message in (
        (detector, 'RLE', "^masks='RLE' is not one of full, rle$"),
        (boxes_alone, 'rle', 'FCNMaskHead pastes, and FasterRCNN has no RoI head with masks; leave masks= out'),
        (detector.backbone, 'rle', 'and SLABSwin has no RoI head with masks'),
        (MODELS.build(cfg).eval(), 'rle', 'and RTMDet has no RoI head with masks'),
        (other_head, 'rle', 'and MaskRCNN has OtherMaskHead; leave masks= out'),
    ):
        with pytest.raises(DeploymentError, match=message):
            slab_det.deploy(model, masks=form)
    export_onnx(boxes_alone, tmp_path / 'boxes.onnx')
    for form, message in (('RLE', 'is not one of full, rle'), ('rle', 'boxes.onnx outputs no masks; leave masks= out')):
        with pytest.raises(ExportError, match=message):
            ExportedDetector(str(tmp_path / 'boxes.onnx'), masks=form)
