"""benchmarks/gpu.py adds a run to the stored results; there is no GPU here, so nothing that it measures is one's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import slab_det
from benchmarks import gpu
from benchmarks.results import FOLDER
from slab_det.measure import timer


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, small_detector: Callable) -> None:
    """Small detectors in place of full-size ones, and a clock in place of CUDA's; the rest is the script's own."""
    monkeypatch.setattr(gpu, 'DEVICE', 'cpu')
    monkeypatch.setattr(gpu, 'PADDED', (64, 64))
    detector = small_detector(norm_cfg=dict(type='LN'))
    monkeypatch.setattr(gpu, 'build', lambda row: detector)
    monkeypatch.setattr(slab_det, 'deploy', lambda model, dtype: model, raising=False)
    monkeypatch.setattr(slab_det, 'absorb', lambda *arguments, **options: None, raising=False)
    monkeypatch.setattr(timer, 'time_call', lambda call, *others: (1.0, None))
    monkeypatch.setattr(gpu, 'time_call', lambda call, *others: (1.0, call()))
    monkeypatch.setattr(gpu, 'capture_parts', lambda model: {'backbone': model.backbone, 'whole graph': model})
    monkeypatch.setattr(gpu, 'detector_steps', lambda size, batch_size, device: {'LayerNorm': None, 'UN': None})
    step = dict(median_ms=1.0, time_ratio=1.0, peak_mib=1.0, memory_ratio=1.0)
    monkeypatch.setattr(gpu, 'measure_steps', lambda steps, rounds: dict.fromkeys(steps, step))
    monkeypatch.setattr(gpu, 'run_pytest', lambda file: ['FAILED test_one', '1 failed, 5 passed in 3 s'])
    for name in ('reset_peak_memory_stats', 'memory_allocated', 'max_memory_allocated'):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)


# Autocast for a GPU warns on a CPU.
@pytest.mark.filterwarnings('ignore:CUDA is not available')
def test_a_run_of_any_length_is_added_to_the_committed_results(
    on_a_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / 'gpu.json'
    shutil.copy(FOLDER / file.name, file)
    before = json.loads(file.read_text())
    monkeypatch.setattr('sys.argv', ['gpu.py', '--rounds', '2', '--families', 'Swin-T', '--out', str(file)])
    gpu.main()
    after = json.loads(file.read_text())
    assert after['setting'] == before['setting']
    (environment,) = after['environments'][len(before['environments']) :]
    assert all(environment[key] for key in ('commit', 'device', 'cpu', 'versions', 'instructions'))
    changed = {(new['part'], new['name']) for new in after['rows'] if new not in before['rows']}
    kept = [old for old in before['rows'] if (old['part'], old['name']) not in changed]
    assert [new for new in after['rows'] if (new['part'], new['name']) not in changed] == kept
    names = dict(
        tests=gpu.TESTS,
        detectors=gpu.FAMILIES['Swin-T'],
        parts=('Swin-T, LayerNorm', 'Swin-T-PRepBN', 'PVT-S, LayerNorm', 'PVT-S-PRepBN'),
        training=('LayerNorm', 'UN'),
        absorption=('Swin-T, LayerNorm',),
    )
    assert changed == {(part, name) for part in names for name in names[part]}
    for new in after['rows']:
        measured_here = new['environment'] == len(after['environments']) - 1
        assert measured_here == ((new['part'], new['name']) in changed)
        if measured_here and new['part'] == 'detectors':
            assert new['rounds'] == 2 and new['median_ms'] > 0 and new['first_call_s'] > 0
        if measured_here and new['part'] == 'tests':
            assert new['failed'] == ['FAILED test_one'] and new['summary'] == '1 failed, 5 passed in 3 s'
    printed = capsys.readouterr().out
    assert all(f'\n{title}\n' in printed for title in ('detectors', 'parts', 'training'))
