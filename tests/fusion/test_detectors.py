"""Output norms fold in every detector that hands them to an FPN and to nothing else."""

import pytest
import torch
from conftest import SMALL_SWIN, random_sizes, randomize, raw_outputs
from mmdet.models.detectors import RetinaNet
from mmdet.registry import MODELS
from mmengine.config import Config

import slab_det
from slab_det.norms import ChannelAffine

IN_CHANNELS = [8, 16, 32, 64]
ON_INPUT = 'neck.fpn_convs.3 reads the same map'


@pytest.fixture
def build():
    def build(name, backbone=SMALL_SWIN, **neck):
        cfg = Config.fromstring(f"_base_ = ['mmdet::_base_/models/{name}.py']", '.py').model
        cfg.backbone = backbone
        cfg.neck.update(in_channels=IN_CHANNELS, out_channels=16, **neck)
        if 'roi_head' in cfg:
            cfg.rpn_head.update(in_channels=16, feat_channels=16)
            cfg.roi_head.bbox_roi_extractor.out_channels = 16
            for head in cfg.roi_head.bbox_head:
                head.update(in_channels=16, fc_out_channels=16, num_classes=3)
        else:
            cfg.bbox_head.update(in_channels=16, feat_channels=16, num_classes=3)
        model = MODELS.build(cfg)
        randomize(model, 5)
        slab_det.set_gamma(model, 0)
        model.eval()
        return model.double()

    return build


@torch.no_grad()
def outputs(model, images):
    if hasattr(model, 'roi_head'):
        # A cascade gives a list of the proposals, then lists with the outputs of each stage.
        return [x for part in raw_outputs(model, images) for x in (part if isinstance(part, list | tuple) else [part])]
    features = model.extract_feat(images)
    return [*features, *(x for level in model.bbox_head(features) for x in level)]


def assert_fused_equals(fused, model):
    for i, size in enumerate(random_sizes(3, seed=6)):
        images = torch.randn(1 + i % 2, 3, size[0] | 1, size[1] | 1).double()
        for output, reference in zip(outputs(fused, images), outputs(model, images), strict=True):
            difference = ((output - reference).abs().max() / reference.abs().max()).item()
            assert difference <= 1e-9, (size, difference)


def left_affine(fused):
    left = {fate.norm: fate.reason for fate in fused.fusion_report.norms if fate.fate != 'folded'}
    assert list(left) == [name for name, m in fused.named_modules() if isinstance(m, ChannelAffine)]
    return left


@pytest.mark.parametrize('backbone', ['SLABSwin', 'SwinTransformer'])
@pytest.mark.parametrize(
    ('neck', 'left'),
    [
        # mmdet's RetinaNet: start_level=1, add_extra_convs='on_input'
        ({}, {'backbone.norm0': 'the FPN does not read this level', 'backbone.norm3': ON_INPUT}),
        (dict(add_extra_convs='on_output'), {'backbone.norm0': 'the FPN does not read this level'}),
        (dict(add_extra_convs='on_lateral', start_level=0), {}),
        (dict(add_extra_convs=False), {'backbone.norm0': 'the FPN does not read this level'}),
    ],
    ids=str,
)
def test_retinanet_fuses_exactly(build, backbone, neck, left):
    model = build('retinanet_r50_fpn', dict(SMALL_SWIN, type=backbone), **neck)
    fused = slab_det.fuse(model)
    assert left_affine(fused) == left
    into = {fate.norm: fate.into for fate in fused.fusion_report.norms}
    assert into['backbone.norm2'] == f'neck.lateral_convs.{2 - model.neck.start_level}.conv'
    assert_fused_equals(fused, model)


def test_cascade_rcnn_fuses_exactly(build):
    model = build('cascade-rcnn_r50_fpn')
    fused = slab_det.fuse(model)
    assert left_affine(fused) == {}
    assert_fused_equals(fused, model)


class Renamed(RetinaNet):
    """Nothing but another name."""

    def loss(self, batch_inputs, batch_data_samples):
        return super().loss(batch_inputs, batch_data_samples)


class OwnFeatures(RetinaNet):
    def extract_feat(self, batch_inputs):
        return self.neck(tuple(x.relu() for x in self.backbone(batch_inputs)))


class SecondReader(RetinaNet):
    @torch.no_grad()
    def predict(self, batch_inputs, batch_data_samples, rescale=True):
        return [part for part in map(lambda model: model.backbone(batch_inputs), [self])]


class Reader:
    @property
    def stages(self):
        return [self.backbone]


class WithReader(RetinaNet, Reader):
    """A reader behind mmdet's own classes in the order of inheritance."""


@pytest.mark.parametrize(
    ('kind', 'reason'),
    [
        (Renamed, ''),
        (OwnFeatures, 'OwnFeatures has an extract_feat of its own'),
        (SecondReader, 'SecondReader.predict may read the backbone too'),
        (WithReader, 'Reader.stages may read the backbone too'),
    ],
)
def test_a_subclass_that_may_read_the_outputs_elsewhere_keeps_their_norms(build, kind, reason):
    model = build('retinanet_r50_fpn', start_level=0, add_extra_convs='on_output')
    model.__class__ = kind
    fused = slab_det.fuse(model)
    assert left_affine(fused) == ({f'backbone.norm{i}': reason for i in range(4)} if reason else {})
    assert_fused_equals(fused, model)


def test_a_detector_whose_extract_feat_was_replaced_keeps_its_norms(build):
    model = build('retinanet_r50_fpn', start_level=0, add_extra_convs='on_output')
    model.extract_feat = lambda images: model.backbone(images)
    assert {fate.norm for fate in slab_det.fuse(model).fusion_report.select('affine')} == {
        f'backbone.norm{i}' for i in range(4)
    }
