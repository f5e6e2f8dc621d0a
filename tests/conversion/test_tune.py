"""A student meets its teacher in a short training without labels."""

import copy
import math
import warnings

import pytest
import torch
from mmdet.registry import MODELS

import slab_det
from slab_det.conversion import DistillationError, convert_norms, tune
from slab_det.recalibration import recalibration_dataloader


@pytest.fixture
def pair(small_detector):
    """A LayerNorm detector, and a fused one whose norms only have the statistics of the images."""
    teacher = small_detector('faster_rcnn', norm_cfg=dict(type='LN'))
    batches = [torch.randn(2, 3, 64, 64) * (1 + i) for i in range(3)]
    student = convert_norms(teacher, dict(type='TokenBN'))
    slab_det.recalibrate(student, batches, max_passes=3, progress=False)
    return slab_det.fuse(student), teacher, batches


def feature_error(student, teacher, images):
    with torch.no_grad():
        pairs = zip(student.extract_feat(images), teacher.extract_feat(images), strict=True)
        return sum(((s - t).square().sum() / t.square().sum()).item() for s, t in pairs) / 5


def test_a_student_comes_nearer_and_the_report_is_true(pair, capsys):
    student, teacher, batches = pair
    start = sum(feature_error(student, teacher, images) for images in batches) / 3
    untouched = copy.deepcopy(teacher.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        tuned, report = tune(student, teacher, batches, iterations=25, lr=2e-3, backbone_lr_mult=0.3)
    assert tuned is student and not any(part.training for part in student.modules())
    end = sum(feature_error(student, teacher, images) for images in batches) / 3
    assert report.start == pytest.approx(start, rel=1e-4) and report.end == pytest.approx(end, rel=1e-4)
    assert end < 0.8 * start, report
    assert len(report.tenths) == 9 and report.tenths[-1] < report.tenths[0]
    torch.testing.assert_close(teacher.state_dict(), untouched, rtol=0, atol=0)
    assert '25/25' in (out := capsys.readouterr().out) and out.count('FPN error') == 25


def test_backbone_learns_at_its_own_rate_and_frozen_weights_do_not(pair):
    student, teacher, batches = pair
    student.neck.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    # Of one step of AdamW without decay the largest change is the learning rate.
    tune(student, teacher, batches, iterations=1, lr=1e-3, backbone_lr_mult=0.25, progress=False)
    changes = {name: (p - before[name]).abs().max().item() for name, p in student.named_parameters()}
    for part, expected in dict(backbone=2.5e-4, neck=0.0, rpn_head=1e-3, roi_head=1e-3).items():
        change = max(change for name, change in changes.items() if name.startswith(part))
        assert change == pytest.approx(expected, rel=1e-2), part


def test_a_rate_that_destroys_the_student_is_warned_of(pair):
    student, teacher, batches = pair
    with pytest.warns(UserWarning, match='moved the student away .* lower lr than 0.02'):
        _, report = tune(student, teacher, batches, iterations=10, lr=0.02, backbone_lr_mult=1.0, progress=False)
    assert report.end > report.start


def test_batches_of_a_data_loader_are_prepared_as_the_detector_does(small_run_cfg):
    cfg = small_run_cfg('loaded', norm_cfg=dict(type='LN'))
    loader = recalibration_dataloader(cfg, 3, 'test')
    teacher = MODELS.build(cfg.model).eval()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.neck.lateral_convs[0].conv.weight.mul_(1.2)
    images = [teacher.data_preprocessor(batch)['inputs'] for batch in loader]
    expected = sum(feature_error(student, teacher, batch) for batch in images) / 3
    _, report = tune(student, teacher, loader, iterations=2, lr=1e-6, progress=False)
    assert report.start == pytest.approx(expected, rel=1e-3)


def test_errors_leave_the_student_as_it_was(pair):
    student, teacher, batches = pair
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(DistillationError, match='not finite in iteration 2'):
        tune(student, teacher, [batches[0], batches[1] * math.nan], iterations=3, progress=False)
    torch.testing.assert_close(student.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(DistillationError, match='not an iterator'):
        tune(student, teacher, iter(batches), progress=False)
    with pytest.raises(DistillationError, match='no batch'):
        tune(student, teacher, [], progress=False)
    with pytest.raises(ValueError, match='iterations=0'):
        tune(student, teacher, batches, iterations=0)
