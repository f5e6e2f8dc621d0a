"""The soak tells a detector whose memory stays flat from one that keeps images, and sees results change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slab_det
from benchmarks import soak


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('soak')
    soak.write_files(folder)
    return folder


@pytest.mark.parametrize('runtime', soak.RUNTIMES)
def test_memory_stays_flat_and_results_stay_the_same(runtime: str, files: Path) -> None:
    if runtime != 'torch':
        pytest.importorskip(runtime)
    result = soak.soak_runtime(files, runtime, 40)
    assert len(result['memory_mb']) == soak.LOOKS and result['detections'] > 40 and result['probe_detections']
    assert result['growth_of_second_half'] < 0.05 and result['probe_changed'] == 0, result


def test_a_leak_and_a_drift_are_seen(files: Path) -> None:
    detector = slab_det.load_detector(files / 'fused_config.py', files / 'fused.pth', device='cpu')
    kept: list[np.ndarray] = []

    def leaking(image: np.ndarray | bytes) -> object:
        kept.append(np.ones(10**6))
        sample = detector(image)
        sample.pred_instances.scores += len(kept)
        return sample

    result = soak.soak(leaking, 40)
    assert not result['flat'] and result['probe_changed'] == soak.LOOKS - 1, result
