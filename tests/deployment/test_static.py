"""StaticDetector, which a CUDA graph holds, finds what mmdet finds, to the last bit."""

import os
import random

import pytest
import torch
from graph_cases import CONFIGS, build, noise

from slab_det.deployment.detection import EMPTY
from slab_det.deployment.gpu.static import Frame, StaticDetector
from slab_det.deployment.masks import paste_masks

SIZES = ((64, 96), (75, 102), (130, 66), (33, 47), (128, 224))
# Number of detectors of each kind; SLAB_DET_FUZZ=25 makes 200.
NUM_MODELS = int(os.environ.get('SLAB_DET_FUZZ', 5))


def predict(model, size, ori_shape):
    """What mmdet finds, and what the static form finds."""
    data = model.data_preprocessor(noise(size, ori_shape), False)
    frame = Frame(*torch.tensor(Frame.numbers(data['data_samples'][0].metainfo)))
    found = StaticDetector(model)(data['inputs'], frame)
    return model(**data, mode='predict')[0].pred_instances, found


@pytest.mark.parametrize('kind', CONFIGS)
@torch.no_grad()
def test_it_finds_what_mmdet_finds(kind):
    rng, num_exact = random.Random(0), 0
    for seed, size in enumerate((SIZES * NUM_MODELS)[:NUM_MODELS]):
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
