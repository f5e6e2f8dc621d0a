"""What is given in place of batches of images is refused in one line, by every function that reads batches."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import SMALL_SWIN, as_trained, differing
from mmdet.registry import MODELS
from torch.utils.data import DataLoader, IterableDataset

import slab_det
from slab_det.common.batches import one_pass
from slab_det.common.errors import CheckpointError, DataError, SlabDetError
from slab_det.compare.detections import detect
from slab_det.fusion import verify_fusion

IMAGE = torch.zeros(1, 3, 64, 64)
CASES = [
    (IMAGE, r'one Tensor of shape \(1, 3, 64, 64\).*\[images\]'),
    (IMAGE.numpy(), r'one ndarray of shape \(1, 3, 64, 64\).*\[images\]'),
    ('photos', 'are a str.*image_folder_dataloader'),
    (dict(inputs=[IMAGE]), 'are a dict.*data loader'),
    (None, 'are a NoneType'),
    ([IMAGE[0]], r'the shape \(B, 3, H, W\), not \(3, 64, 64\)'),
    ([IMAGE[:0]], r'not \(0, 3, 64, 64\)'),
    ([IMAGE[:, :1]], '1 channels, and the model reads 3'),
    ([IMAGE.byte()], r'floating point, not torch\.uint8'),
    ([IMAGE.double()], r'torch\.float64, and the model torch\.float32'),
    ([[IMAGE]], "a batch is a list.*'inputs'"),
    ([np.zeros((1, 3, 64, 64), np.float32)], 'a batch is a ndarray'),
    ([dict(inputs=[IMAGE[0]])], 'has no data_preprocessor.*whole detector'),
]


@pytest.fixture(scope='module')
def backbones() -> dict:
    """A backbone with PRepBN, fused, and with LayerNorm."""
    model = as_trained(MODELS.build(SMALL_SWIN))
    plain = MODELS.build({**SMALL_SWIN, 'norm_cfg': dict(type='LN')}).eval()
    return dict(model=model, fused=slab_det.fuse(model), plain=plain)


@pytest.mark.parametrize('function', ['recalibrate', 'absorb', 'verify_fusion', 'detect'])
@pytest.mark.parametrize(('images', 'message'), CASES, ids=[message for _, message in CASES])
def test_what_is_no_batch_of_images_is_named(function, images, message, backbones):
    before = copy.deepcopy(backbones['model'].state_dict())
    calls = dict(
        recalibrate=lambda: slab_det.recalibrate(backbones['model'], images, progress=False),
        absorb=lambda: slab_det.absorb(backbones['plain'], images, 1, 'remove', progress=False),
        verify_fusion=lambda: verify_fusion(backbones['model'], backbones['fused'], images),
        detect=lambda: detect(backbones['model'], images),
    )
    with pytest.raises(DataError, match=message) as error:
        calls[function]()
    assert '\n' not in str(error.value)
    assert not differing(backbones['model'], before)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([IMAGE])


def test_loaders_without_batches_of_their_own(backbones):
    images = [IMAGE[0], IMAGE[0] + 1]
    loader = DataLoader(torch.stack(images)[:, None], batch_size=None, shuffle=True)
    first, second = ([*part] for part in [one_pass(loader)] * 2)
    assert len(first) == 2 and all(map(torch.equal, first, second))
    with pytest.raises(DataError, match=r'IterableDataset may yield other images.*\[\*loader\]'):
        slab_det.absorb(backbones['plain'], DataLoader(Endless(), batch_size=None), 1, 'remove', progress=False)


def test_batches_may_be_stacked_in_a_tensor(backbones):
    report = slab_det.recalibrate(copy.deepcopy(backbones['model']), torch.randn(2, 1, 3, 64, 64), progress=False)
    assert report.num_batches == 2


def test_a_double_model_reads_double_images_and_autocast_reads_float(backbones):
    model = copy.deepcopy(backbones['model'])
    images = [torch.randn(2, 3, 64, 64)]
    with torch.autocast('cpu', torch.bfloat16):
        slab_det.recalibrate(model, images, max_passes=1, progress=False)
    slab_det.recalibrate(model.double(), [images[0].double()], max_passes=1, progress=False)


@pytest.mark.parametrize('tol', [-1.0, float('nan')])
def test_a_tolerance_that_is_never_reached_is_refused(tol, backbones):
    with pytest.raises(SlabDetError, match='tol must be a number from 0'):
        slab_det.recalibrate(backbones['model'], [IMAGE], tol=tol)


@pytest.mark.parametrize('weights', [IMAGE, None, 7])
def test_what_is_no_checkpoint_is_named(weights, backbones):
    with pytest.raises(CheckpointError, match='give the name of a file'):
        slab_det.load_pretrained(backbones['plain'], weights)
