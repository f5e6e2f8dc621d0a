"""fuse and absorb support every kind of detector with a Swin, PVT or PVTv2 in mmdet's configs."""

import pytest
import torch
from conftest import CONFIGS, make_affine, randomize
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from teachers import NORMS_GONE
from torch import nn
from zoo import ZOO, zoo_cfg

import slab_det
from slab_det.absorption.absorption import absorb
from slab_det.checkpoints import build_detector
from slab_det.fusion import save_fused

TUNE = Config.fromfile(CONFIGS / '_base_/schedules/tune_absorbed.py')


def feature_maps(model, image):
    # A video detector has no extract_feat.
    return getattr(model, 'extract_feat', model.backbone)(image)


@pytest.mark.parametrize('name', ZOO)
@torch.no_grad()
def test_zoo_detector_fuses_exactly_and_says_what_stays(name):
    model = build_detector(Config(dict(model=zoo_cfg(name))))
    slab_det.convert_norms(model.backbone, dict(type='RepBN'), inplace=True)
    model = randomize(model).double().eval()
    fused = slab_det.fuse(model)
    left = {fusion.norm: fusion.reason for fusion in fused.fusion_report.select('affine')}
    left = {norm.removeprefix('backbone.'): reason for norm, reason in left.items()}
    assert left.keys() == ZOO[name].keys(), left
    assert all(reason in left[norm] for norm, reason in ZOO[name].items()), left
    image = torch.randn(1, 3, *((64, 128) if 'rtmdet' in name else (75, 101))).double()
    for one, other in zip(feature_maps(fused, image), feature_maps(model, image), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * other.abs().max().item())


@pytest.mark.parametrize('name', ZOO)
@torch.no_grad()
def test_zoo_detector_goes_through_absorb(name, tmp_path):
    """LayerNorms with a large eps are affine, so the student computes the teacher's maps up to rounding."""
    cfg = zoo_cfg(name)
    model = randomize(build_detector(Config(dict(model=cfg))), 0).double()
    make_affine(model.backbone)
    student = absorb(model, [torch.randn(1, 3, 58, 70).double() for _ in range(2)], **NORMS_GONE)
    report = student.absorption_report
    kept = {norm.norm.removeprefix('backbone.'): norm.reason for norm in report.kept if 'backbone.' in norm.norm}
    assert kept.keys() == ZOO[name].keys(), kept
    assert all(reason in kept[norm] for norm, reason in ZOO[name].items()), kept
    assert all(norm.reason == 'it is not in the backbone' for norm in report.kept if 'backbone.' not in norm.norm)
    # RTMDet's neck upsamples by 2, so the sides must be divisible by powers of 2.
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
    # The optimizer holds each parameter exactly once, also where heads share layers.
    groups = build_optim_wrapper(rebuilt, TUNE.optim_wrapper).optimizer.param_groups
    assert sum(len(group['params']) for group in groups) == len({*rebuilt.parameters()})
