"""StaticDetector, the function in a CUDA graph, finds what mmdet finds, bit for bit."""

import os
import random

import pytest
import torch
from graph_cases import CONFIGS, EagerOperators, build, noise

from slab_det.deployment.gpu.static import StaticDetector, measure_frame
from slab_det.deployment.masks import paste_masks

SIZES = ((64, 96), (75, 102), (130, 66), (33, 47), (128, 224))
# Number of detectors of each kind; SLAB_DET_FUZZ=25 makes 200.
NUM_MODELS = int(os.environ.get('SLAB_DET_FUZZ', 5))


@pytest.mark.parametrize('kind', CONFIGS)
@torch.no_grad()
def test_static_detector_finds_what_mmdet_finds(kind):
    rng, num_exact = random.Random(0), 0
    for seed, size in enumerate((SIZES * NUM_MODELS)[:NUM_MODELS]):
        torch.manual_seed(seed)
        ori_shape, model = (rng.randint(20, 200), rng.randint(20, 200)), build(kind, rng)
        data = model.data_preprocessor(noise(size, ori_shape), False)
        frame = measure_frame(data['data_samples'][0].metainfo)
        (count, exact), *found = StaticDetector(model, EagerOperators())(data['inputs'], frame)
        if not exact:
            continue
        num_exact += 1
        expected = model(**data, mode='predict')[0].pred_instances
        found = dict(zip(('bboxes', 'scores', 'labels', 'masks'), (x[:count] for x in found), strict=False))
        if 'masks' in found:
            found['masks'] = paste_masks(found['masks'], found['bboxes'], ori_shape, 0.5)
        assert found.keys() == {*expected.keys()}
        for name, values in found.items():
            assert torch.equal(values, expected[name]), (seed, size, name)
    assert num_exact > NUM_MODELS / 2
