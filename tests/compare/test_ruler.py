"""The retained AP of detectors: hand-made detections, whose precision one can count, and a real detector."""

import numpy as np
import pytest
import torch
from conftest import CONFIGS, find_objects
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.structures import InstanceData
from pycocotools import mask as coco_mask
from torch import nn

from slab_det.common.errors import ComparisonError
from slab_det.compare.detections import Detections, detect, mirror_images
from slab_det.compare.ruler import RetainedAP, describe_loss, retained_ap
from slab_det.data import generate
from slab_det.preflight import set_data_root
from slab_det.recalibration import recalibration_dataloader

SQUARE = [10.0, 10.0, 20.0, 20.0]


def found(*objects: tuple[float, int, list[float]]) -> Detections:
    """Detections from (score, label, box as x, y, width, height)."""
    scores, labels, boxes = zip(*objects, strict=True) if objects else ((), (), ())
    return Detections(np.array(scores, float), np.array(labels, int), np.array(boxes, float).reshape(-1, 4))


def apart(index: int) -> list[float]:
    """Boxes that do not overlap."""
    return [100.0 * index, 0.0, 20.0, 20.0]


def agreement(reference: list[Detections], other: list[Detections]) -> float:
    """What ``other`` finds of ``reference``: the teacher itself is the truth."""
    return retained_ap(reference, reference, other).value


TEACHER = [found((0.9, 0, apart(0)), (0.5, 0, apart(1)), (0.4, 1, apart(2))), found((0.7, 0, apart(0)))]


def test_a_detector_agrees_with_itself_and_nothing_agrees_with_nothing() -> None:
    assert agreement(TEACHER, TEACHER) == pytest.approx(1)
    with pytest.raises(ComparisonError, match='0 detections in 2 images'):
        agreement([found(), found()], [found(), found()])
    assert agreement([found((0.9, 0, SQUARE))], [found()]) == 0
    # Another class is another object.
    assert agreement([found((0.9, 0, SQUARE))], [found((0.9, 1, SQUARE))]) == 0


def test_shift_counts_at_the_thresholds_that_it_keeps() -> None:
    # 20x20 moved by 4: 320 / 480 = 0.667 reaches 0.50, 0.55, 0.60 and 0.65 of ten thresholds.
    moved = [14.0, 10.0, 20.0, 20.0]
    assert agreement([found((0.8, 0, SQUARE))], [found((0.8, 0, moved))]) == pytest.approx(0.4)


def test_precision_counts_teachers_scores_as_probabilities() -> None:
    reference = [found((0.8, 0, apart(0)), (0.2, 0, apart(1)))]
    # The teacher: precision 0.8 up to recall 0.8, that is at 81 of 101 recalls, then (0.8 + 0.2) / 2.
    best = (81 * 0.8 + 20 * 0.5) / 101
    # In the wrong order: 0.2 after one, 0.5 after two, which is the best at every recall.
    swapped = [found((0.8, 0, apart(1)), (0.2, 0, apart(0)))]
    assert agreement(reference, swapped) == pytest.approx(0.5 / best)
    # One is missing: the rest has no precision.
    assert agreement(reference, [found((0.8, 0, apart(0)))]) == pytest.approx(81 * 0.8 / 101 / best)
    # A wrong one between them: (0.8 + 0 + 0.2) / 3 at the last 20 recalls.
    wrong = [found((0.8, 0, apart(0)), (0.5, 0, apart(7)), (0.2, 0, apart(1)))]
    assert agreement(reference, wrong) == pytest.approx((81 * 0.8 + 20 / 3) / 101 / best)
    # The same object twice: the second one is wrong too.
    twice = [found((0.8, 0, apart(0)), (0.5, 0, apart(0)), (0.2, 0, apart(1)))]
    assert agreement(reference, twice) == agreement(reference, wrong)
    # Scores are compared across images, though each image alone is in order, and their scale does not count.
    sure, unsure = found((0.9, 0, SQUARE)), found((0.2, 0, SQUARE))
    assert agreement([sure, unsure], [unsure, sure]) < 0.8
    cubed = [Detections(image.scores**3, image.labels, image.regions) for image in TEACHER]
    assert agreement(TEACHER, cubed) == pytest.approx(1)


def test_ties_have_no_order() -> None:
    reference = [found((0.9, 0, apart(0)), (0.1, 0, apart(1)), (0.1, 0, apart(2)))]
    tied = [found((0.5, 0, apart(i)), (0.5, 0, apart(9)), (0.5, 0, apart(2 - i))) for i in (0, 2)]
    one, other = (agreement(reference, [detections]) for detections in tied)
    assert one == pytest.approx(other, rel=1e-12)


def test_classes_weigh_by_their_surest_detection() -> None:
    reference = [found((0.9, 0, apart(0)), (0.3, 1, apart(1)))]
    other = [found((0.6, 0, apart(0)), (0.5, 2, apart(3)))]
    # Class 0 is found, class 1 is not; class 2 has no object, and counts as little as in COCO's AP. A class's AP is its
    # only score.
    assert agreement(reference, other) == pytest.approx(0.9 * 0.9 / (0.9 * 0.9 + 0.3 * 0.3))


def test_masks_are_matched_by_their_pixels() -> None:
    masks = np.zeros((40, 40, 2), np.uint8, order='F')
    masks[:20, :20, 0] = 1
    # The same box, 3/4 of the pixels.
    masks[:20, :20, 1] = 1
    masks[5:15, 5:15, 1] = 0
    whole, hollow = ([mask] for mask in coco_mask.encode(masks))
    one, other = (Detections(np.array([0.9]), np.array([0]), regions) for regions in (whole, hollow))
    assert agreement([one], [other]) == pytest.approx(0.6)
    with pytest.raises(ComparisonError, match='masks'):
        agreement([one], [found((0.9, 0, SQUARE))])
    with pytest.raises(ComparisonError, match='1, 1 and 2 images'):
        agreement([one], [one, one])


def test_more_than_255_masks_in_an_image() -> None:
    class Crowd(nn.Module):
        def forward(self, inputs: torch.Tensor, samples: list, mode: str) -> list:
            masks = torch.zeros(300, 64, 64, dtype=torch.bool)
            for i in range(299):
                masks[i, i % 60 : i % 60 + 4, i // 60 * 12 : i // 60 * 12 + 4] = True
            found = dict(scores=torch.linspace(0.9, 0.1, 300), labels=torch.zeros(300, dtype=torch.long), masks=masks)
            return [DetDataSample(pred_instances=InstanceData(**found))]

    crowd = Crowd()
    crowd.weight = nn.Parameter(torch.zeros(1))
    (detections,) = detect(crowd, [torch.zeros(1, 3, 64, 64)])
    assert len(detections.scores) == 299, 'all but the one without a pixel'
    assert agreement([detections], [detections]) == pytest.approx(1)


@pytest.mark.parametrize('detector', ['mask_rcnn', 'faster_rcnn'])
@torch.no_grad()
def test_detections_are_those_of_the_test_loop(detector: str, tmp_path, small_detector) -> None:
    generate(tmp_path / 'data', num_train=3, num_val=1, size=(96, 80))
    cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
    set_data_root(cfg, tmp_path / 'data')
    model = find_objects(small_detector(detector))
    model.train()
    model.neck.eval()
    loader = recalibration_dataloader(cfg, 3, 'test')
    detections = detect(model, loader)
    assert model.training and model.backbone.training and not model.neck.training, 'as it was'
    model.eval()
    for batch, image in zip(loader, detections, strict=True):
        (sample,) = model.test_step(batch)
        wanted = sample.pred_instances
        assert len(image.scores) > 0 and (np.diff(image.scores) <= 0).all()
        if detector == 'mask_rcnn':
            areas = sorted(int(mask.sum()) for mask in wanted.masks if mask.any())
            assert sorted(coco_mask.area(image.regions)) == areas
        else:
            assert len(image.scores) == len(wanted)
            corners = torch.from_numpy(image.regions[:, :2]), wanted.bboxes[wanted.scores.argsort(descending=True), :2]
            torch.testing.assert_close(*corners, check_dtype=False)
    assert agreement(detections, detections) == pytest.approx(1)


def test_image_tensors_are_taken_as_they_are_and_no_image_is_an_error(small_detector) -> None:
    model = small_detector('faster_rcnn')
    images = torch.randn(2, 3, 64, 96)
    together, one_by_one = detect(model, [images]), detect(model, [images[:1], images[1:]])
    assert len(together) == len(one_by_one) == 2
    assert agreement(together, one_by_one) > 0.999
    other = small_detector('faster_rcnn', seed=1)
    assert agreement(together, detect(other, [images])) < 0.5
    with pytest.raises(ComparisonError, match='no image'):
        detect(model, [])


def test_what_differs_by_chance_is_no_loss():
    # Teacher and student miss different halves of what is there; both find as much of it.
    truth = [found((0.9, 0, apart(0)), (0.9, 0, apart(1)))]
    teacher, student = [found((0.9, 0, apart(0)))], [found((0.9, 0, apart(1)))]
    assert agreement(teacher, student) == 0
    assert retained_ap(truth, teacher, student).value == 1
    # A student that finds both is better than its teacher, one that finds something else is worse.
    assert retained_ap(truth, teacher, truth).value == pytest.approx(101 / 51)
    assert retained_ap(truth, teacher, [found((0.9, 0, apart(5)))]).value == 0
    with pytest.raises(ComparisonError, match='1 detections in 1 images, and none of them in the mirrored'):
        retained_ap(truth, [found((0.9, 0, apart(5)))], student)


@pytest.mark.parametrize('detector', ['mask_rcnn', 'faster_rcnn'])
@torch.no_grad()
def test_mirrored_detections_are_those_of_the_mirrored_image(detector: str, small_detector) -> None:
    model = small_detector(detector)
    images = torch.randn(1, 3, 64, 96)
    (mirrored,), (plain,) = detect(model, [images], mirrored=True), detect(model, [images.flip(-1)])
    assert len(mirrored.scores) > 3 and (mirrored.scores == plain.scores).all()
    if detector == 'mask_rcnn':
        decoded = [coco_mask.decode(part.regions) for part in (mirrored, plain)]
        assert (decoded[0] == decoded[1][:, ::-1]).all() and (decoded[0] != decoded[1]).any()
    else:
        x, y, w, h = plain.regions.T
        np.testing.assert_allclose(mirrored.regions, np.stack([96 - x - w, y, w, h], 1), atol=1e-9)
    # Twice mirrored is not mirrored.
    np.testing.assert_equal(plain.mirror(96).mirror(96).regions, plain.regions)


def test_padding_stays_where_it_is():
    images = torch.arange(2 * 2 * 4.0).view(2, 1, 2, 4)
    images[0, :, :, 3:] = -1
    mirrored = mirror_images(images, [(2, 3), (2, 4, 3)])
    assert mirrored[0, 0].tolist() == [[2, 1, 0, -1], [6, 5, 4, -1]]
    assert mirrored[1, 0].tolist() == [[11, 10, 9, 8], [15, 14, 13, 12]]


def test_standard_error_is_the_jackknifes() -> None:
    generator = np.random.default_rng(0)
    corners = generator.uniform(0, 50, (5, 4, 2)).tolist()
    truth = [found(*((0.9 - 0.2 * i, 0, [*each[i], 30.0, 30.0]) for i in range(4))) for each in corners]

    def moved(*steps: float) -> list[Detections]:
        return [
            Detections(one.scores, one.labels, one.regions + [[step, 0, 0, 0]])
            for one, step in zip(truth, steps, strict=True)
        ]

    teacher, student = moved(2, 0, 1, 2, 4), moved(0, 1, 3, 9, 0)
    without = [
        retained_ap(*([x for k, x in enumerate(part) if k != i] for part in (truth, teacher, student))).value
        for i in range(5)
    ]
    expected = np.sqrt(4 / 5 * sum((value - np.mean(without)) ** 2 for value in without))
    assert retained_ap(truth, teacher, student).error == pytest.approx(expected, rel=1e-12) and expected > 0.01
    assert retained_ap(truth, teacher, teacher) == (1, 0)
    assert retained_ap(truth[:1], teacher[:1], student[:1]).error == np.inf


def test_no_loss_is_announced_from_few_detections():
    assert describe_loss(RetainedAP(0.98, 0.01), 500) == 'AP about 1.0 (0.0 to 2.0) lower if the teacher has 50'
    assert '8 detections are too few' in describe_loss(RetainedAP(0.999, 0.01), 8)
    assert 'fewer than two of the compared images' in describe_loss(RetainedAP(0.999, np.inf), 80)
    # Nobody can lose more than there is.
    assert RetainedAP(0.1, 0.2).losses(0.4) == pytest.approx((0.36, 0.2, 0.4))
    assert RetainedAP(0.9, np.inf).losses(0.4) == pytest.approx((0.04, -0.4, 0.4))
