"""The soak tells a detector whose memory stays flat from one that keeps memory, and sees results change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData

from benchmarks import soak


@pytest.mark.parametrize('leaks', [False, True])
def test_a_leak_and_a_drift_are_seen(leaks: bool) -> None:
    kept: list[np.ndarray] = []

    def detector(image: np.ndarray | bytes) -> DetDataSample:
        if leaks:
            kept.append(np.ones(10**6))
        return DetDataSample(pred_instances=InstanceData(scores=torch.ones(2) + len(kept)))

    result = soak.soak(detector, 40)
    assert len(result['memory_mb']) == soak.LOOKS and result['detections'] == 2 * 40 and result['probe_detections'] == 2
    assert result['flat'] != leaks and result['probe_changed'] == (soak.LOOKS - 1 if leaks else 0), result
