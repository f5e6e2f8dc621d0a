"""The images that an absorption reads: crops of large ones, and which tokens and regions of them."""

import pytest
import torch
from conftest import find_objects, pictures
from teachers import build_teacher, prune, survey

from slab_det.absorption import images as reading
from slab_det.absorption.channels import judge as judging
from slab_det.absorption.channels.judge import Judge
from slab_det.absorption.images import WHOLE, fewer_objects, read_images
from slab_det.absorption.tokens import POSITIONS, sample_tokens
from slab_det.attention import ShiftedWindowAttention
from slab_det.backbones.adopt import adopt


@pytest.mark.parametrize('backbone', ['SLABSwin', 'SwinTransformer', 'SLABPVT'])
def test_large_images_are_cropped_at_windows_unless_positions_count(backbone, tmp_path, monkeypatch):
    model, batches = build_teacher(backbone), pictures(4, (256, 700))
    adopt(model)
    windows = [module.w_msa.window_size for module in model.modules() if isinstance(module, ShiftedWindowAttention)]
    monkeypatch.setattr(reading, 'CROP', 224 * 300)
    monkeypatch.setattr(reading, 'MOST_IMAGES', 4)
    images = read_images(model, batches, tmp_path, heads=True)
    stored = [images.store.get(str(i)) for i in range(4)]
    assert torch.equal(images.store.get(str(WHOLE)), batches[0]), 'multiply-adds are counted on the whole first'
    for batch, image in zip(batches, stored, strict=True):
        if not windows:
            assert torch.equal(image, batch)
            continue
        places = [(y, x) for y in (0, 224) for x in (0, 224, 448, 672)]
        height, width = image.shape[-2:]
        assert image.numel() < 0.7 * batch.numel()
        assert any(torch.equal(batch[..., y : y + height, x : x + width], image) for y, x in places)
    for index, image in enumerate(stored):
        (sample,) = images.samples[index]
        assert sample.img_shape == sample.ori_shape == image.shape[-2:], 'objects are wanted where they lie in the crop'
        regions = images.regions[index]
        assert regions.weights[0].shape[-2:] == torch.Size(-(-side // 4) for side in image.shape[-2:])
        assert regions.proposals[0][:, 3].max() <= image.shape[-1]


def test_crops_begin_at_the_windows_of_all_stages(tmp_path, monkeypatch):
    model, batches = build_teacher('SLABSwin', window_sizes=(12, 12, 7, 7)), pictures(1, (672, 1344))
    adopt(model)
    monkeypatch.setattr(reading, 'CROP', 672 * 672)
    monkeypatch.setattr(reading, 'MOST_IMAGES', 1)
    # Windows of 48, 96, 112 and 224 pixels.
    assert read_images(model, batches, tmp_path).store.get('0').shape[-2:] == (672, 672)


def test_sampled_tokens_fall_into_every_row_and_column_of_a_window():
    places = torch.stack(torch.meshgrid(torch.arange(112), torch.arange(168), indexing='ij'), -1).flatten(0, 1)
    (some, again) = sample_tokens(places[None], places[None])
    assert len(some) == POSITIONS and torch.equal(some, again)
    for counts in (torch.bincount(some[:, axis] % 7) for axis in (0, 1)):
        assert counts.min() > 0.8 * POSITIONS / 7
    few = torch.randn(2, 5, 3)
    assert torch.equal(sample_tokens(few)[0], few.flatten(0, 1))


def test_drafts_are_compared_on_fewer_crops_than_small_images(tmp_path, monkeypatch):
    model = build_teacher('SLABSwin')
    adopt(model)
    small = read_images(model, pictures(12, (32, 32)), tmp_path, heads=True)
    assert [*Judge(model, small).batches] == [*range(12)]
    monkeypatch.setattr(judging, 'JUDGED_PIXELS', 11 * 32 * 32)
    assert [*Judge(model, small).batches] == [*range(11)] and Judge(model, small).held_out == [4, 9]
    monkeypatch.setattr(judging, 'JUDGED_CROPS', 11)
    monkeypatch.setattr(reading, 'CROP', 224 * 224)
    monkeypatch.setattr(reading, 'MOST_IMAGES', 12)
    large = read_images(model, pictures(12, (256, 480)), tmp_path, heads=True)
    assert [*Judge(model, large).batches] == [*range(11)]


def test_a_crop_has_its_share_of_the_objects_of_an_image(tmp_path, monkeypatch):
    model, (image,) = find_objects(build_teacher(detector='faster_rcnn')), pictures(1, (224, 448))
    adopt(model)
    monkeypatch.setattr(reading, 'CROP', 224 * 224)
    monkeypatch.setattr(reading, 'MOST_IMAGES', 1)
    images = read_images(model, [image], tmp_path, heads=True)
    assert images.shares == {0: 0.5}
    limits = model.rpn_head.test_cfg.max_per_img, model.roi_head.test_cfg.max_per_img
    assert limits == (50, 20)
    with pytest.raises(KeyError), fewer_objects(model, 0.45):
        assert (model.rpn_head.test_cfg.max_per_img, model.roi_head.test_cfg.max_per_img) == (23, 9)
        raise KeyError
    assert (model.rpn_head.test_cfg.max_per_img, model.roi_head.test_cfg.max_per_img) == limits
    model.roi_head.test_cfg.max_per_img = -1
    with fewer_objects(model, 0.45):
        assert model.roi_head.test_cfg.max_per_img == -1, 'no limit'
    model.roi_head.test_cfg.max_per_img = 20
    # A mask without a pixel is not compared.
    assert 0 < len(Judge(model, images).find(0)[0].scores) <= 10


def test_drafts_of_heads_read_the_maps_of_the_teacher(tmp_path):
    model = find_objects(build_teacher(detector='faster_rcnn'))
    adopt(model)
    surveyed = survey(model, pictures(4, (34, 70)), tmp_path)
    judge, store = Judge(model, surveyed.observer.images), surveyed.observer.images.store
    head = surveyed.kinds['roi_head.bbox_head']
    draft = prune(surveyed, {name: surveyed.estimates[name].counts[-1] for name in head})
    students = dict.fromkeys(judge.batches, draft)
    expected = judge.measure(students)
    before = {*store.values}
    draft.backbone = None
    assert judge.measure(students, same_maps=True) == judge.measure(students, same_maps=True) == expected
    judge.drop_maps()
    assert {*store.values} == before
