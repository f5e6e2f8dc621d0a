"""absorb with channels: hidden channels go everywhere until a share of the multiply-adds is left."""

import pytest
import torch
from conftest import differing, layer_norms, pictures, raw_outputs, relative_difference, small_mmdet_cfg
from mmdet.registry import MODELS
from mmengine.config import Config
from teachers import SWIN, as_trained, build_teacher

import slab_det
from slab_det.absorption.absorb import absorb
from slab_det.absorption.budget import Survey
from slab_det.absorption.plan import make_plan
from slab_det.checkpoints import build_detector
from slab_det.fusion import save_fused


def build_retinanet():
    cfg = small_mmdet_cfg('retinanet/retinanet_r50_fpn_1x_coco', dict(SWIN, type='SLABSwin'))
    cfg.bbox_head.update(stacked_convs=2, feat_channels=16)
    model = as_trained(MODELS.build(cfg))
    model.cfg = cfg
    return model


TEACHERS = {
    'SLABSwin': lambda: build_teacher('SLABSwin'),
    'SwinTransformer': lambda: build_teacher('SwinTransformer', 'faster_rcnn'),
    'PyramidVisionTransformer': lambda: build_teacher('PyramidVisionTransformer', 'faster_rcnn'),
    'RetinaNet': build_retinanet,
}


@pytest.fixture(params=TEACHERS)
def teacher(request):
    """A detector with random weights."""
    return TEACHERS[request.param]()


def outputs(model, image):
    """The maps of the neck and what the heads compute from them."""
    with torch.no_grad():
        if hasattr(model, 'roi_head'):
            return [*model.extract_feat(image), *raw_outputs(model, image)]
        maps = model.extract_feat(image)
        return [*maps, *(x for level in model.bbox_head(maps) for x in level)]


def test_the_students_multiply_adds_are_those_planned(teacher, tmp_path):
    """The student is rebuilt from its config, and deployed."""
    images = pictures(5, (34, 70))
    survey = Survey(make_plan(teacher, images, tmp_path, channels='everywhere'))
    share = 0.6 * survey.least_share() + 0.4
    counts = survey.choose(share)
    student = absorb(teacher, images, keep='all', channels=share, progress=False)
    report = student.absorption_report
    assert counts == {place.place: place.kept for place in report.pruned} == student.fusion_report.channels
    before, after = report.multiply_adds
    assert after == survey.multiply_adds(counts) and share - 0.1 < after / before <= share
    assert layer_norms(student) == layer_norms(teacher)
    assert f'{after / before:.0%}' in str(report)
    checkpoint, config = save_fused(student, Config(dict(model=teacher.cfg)), tmp_path / 'fused.pth')
    rebuilt = build_detector(Config.fromfile(config), str(checkpoint))
    image = pictures(1, (75, 101), seed=5)[0]
    assert not differing(student, rebuilt)
    assert relative_difference(outputs(rebuilt, image), outputs(student, image)) < 1e-4
    assert relative_difference(outputs(slab_det.deploy(rebuilt), image), outputs(student, image)) < 1e-4
