"""The check of speed between commits: what it compares, and that it only reports."""

import json
import runpy
from pathlib import Path

import pytest
from conftest import CONFIGS

SCRIPT = CONFIGS.parent / 'benchmarks' / 'speed_check.py'


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The script's names, with the quick start's models in both checks."""
    names = runpy.run_path(str(SCRIPT), run_name='imported')
    backbone, detector = names['CHECKS']
    small = (names['Check']('backbone', None, detector.models), names['Check']('detector', (64, 64), detector.models))
    monkeypatch.setitem(names['main'].__globals__, 'CHECKS', small)
    return names


@pytest.fixture
def call(script: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def run(*arguments: object) -> str:
        command = ['speed_check.py', '--rounds', 1, '--repeat', 2, '--threads', 1, '--file', tmp_path / 'stored.json']
        monkeypatch.setattr('sys.argv', [str(argument) for argument in (*command, *arguments)])
        script['main']()
        return capsys.readouterr().out

    return run


def rows(printed: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in printed.splitlines()
        if line.startswith('| quick')
    ]


def test_ratios_are_compared_with_the_stored_ones_of_the_same_scope(call, tmp_path: Path) -> None:
    assert [row[2:] for row in rows(call('--size', 64, 96, '--store'))] == [['–', '–']] * 2, 'nothing is stored yet'
    stored = json.loads((tmp_path / 'stored.json').read_text())
    backbone, detector = stored
    assert backbone.startswith('backbone, batch 1, 64x96 (HxW), float32')
    assert detector.startswith('detector, batch 1, 64x64 (HxW), float32')
    ratio = stored[backbone]['ratios']['quick start, SLAB fused']
    assert ratio['low'] <= ratio['ratio'] <= ratio['high']
    # As if this commit were slower by far, and the detector measured on another device: reported, nothing more.
    ratio['ratio'] = 0.01
    stored[detector.replace('detector', 'elsewhere')] = stored.pop(detector)
    (tmp_path / 'stored.json').write_text(json.dumps(stored))
    printed = call('--size', 64, 96)
    (_, here, there, over), other = rows(printed)
    assert there.startswith('0.010')
    assert float(over) == pytest.approx(float(here.split()[0]) / 0.01, abs=0.1)
    assert other[2:] == ['–', '–'], 'stored for another scope'
    assert f'stored ({stored[backbone]["commit"]})' in printed
    assert json.loads((tmp_path / 'stored.json').read_text()) == stored, 'only --store writes'
