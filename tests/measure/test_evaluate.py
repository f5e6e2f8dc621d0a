"""AP without a runner, for a detector that finds all objects and one that skips every second image."""

import json

import pytest
import torch
from mmengine.structures import InstanceData
from torch import nn

from slab_det.measure.evaluate import evaluate, evaluate_groups


class Oracle(nn.Module):
    """Predicts the annotations of every ``every``-th image, and nothing in the others."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.calls = every, 0

    def test_step(self, batch: dict) -> list:
        assert not self.training
        for sample in batch['data_samples']:
            objects = sample.gt_instances if self.calls % self.every == 0 else sample.gt_instances[:0]
            # Annotations have the coordinates of the original image at test time.
            found = dict(bboxes=objects.bboxes.tensor, labels=objects.labels, scores=torch.ones(len(objects)))
            sample.pred_instances = InstanceData(**found)
            self.calls += 1
        return batch['data_samples']


@pytest.mark.parametrize('every', [1, 2])
def test_ap_is_one_only_if_all_objects_are_found(every: int, small_run_cfg) -> None:
    cfg = small_run_cfg()
    cfg.val_evaluator.metric = 'bbox'
    oracle = Oracle(every)
    found = evaluate(oracle, cfg)
    assert oracle.calls == 4 and oracle.training and {*found} == {'bbox'}
    if every == 1:
        assert found['bbox']['AP'] == pytest.approx(1, abs=1e-3)
    else:
        assert 0.1 < found['bbox']['AP'] < 0.9


def test_ap_without_a_group_of_images_is_that_of_the_others(small_run_cfg, tmp_path) -> None:
    cfg = small_run_cfg()
    cfg.val_evaluator.update(metric='bbox', outfile_prefix=str(tmp_path / 'found'))
    found, parts = evaluate_groups(Oracle(2), cfg, 2)
    # Everything is found in one group, and nothing in the other.
    assert 0.1 < found['bbox']['AP'] < 0.9
    assert parts[0] == {} and parts[1]['bbox']['AP'] == pytest.approx(1, abs=1e-3)
    images = {entry['image_id'] for entry in json.loads((tmp_path / 'found.bbox.json').read_text())}
    assert len(images) == 2 and len(parts) == 2, "the config's file holds what was found in all images"
    assert len(evaluate_groups(Oracle(1), cfg, 10)[1]) == 4 and evaluate_groups(Oracle(1), cfg, 0)[1] == []
