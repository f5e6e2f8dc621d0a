"""The check of speed between commits: what it compares, and that it only reports."""

from pathlib import Path

import pytest

from benchmarks import speed_check
from benchmarks.results import Results


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """A function: the cells of the rows that the script prints for the quick start's backbones."""
    _, detector = speed_check.CHECKS
    monkeypatch.setattr(speed_check, 'CHECKS', (detector._replace(scope='backbone', size=None),))

    def run(*arguments: str) -> list[str]:
        command = f'speed_check.py --rounds 1 --repeat 2 --threads 1 --size 64 96 --file {tmp_path / "stored.json"}'
        monkeypatch.setattr('sys.argv', [*command.split(), *arguments])
        speed_check.main()
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('| quick'))
        return [cell.strip() for cell in row.strip('|').split('|')]

    return run


def test_ratios_are_compared_with_the_stored_ones_of_the_same_scope(call, tmp_path: Path) -> None:
    file = tmp_path / 'stored.json'
    assert call('--store')[2:] == ['–', '–'], 'nothing is stored yet'
    stored = Results(file)
    (row,) = stored.rows
    assert row['name'] == 'quick start, SLAB fused' and stored.environments[row['environment']]['commit']
    assert row['scope'].startswith('backbone, batch 1, 64x96 (HxW), float32')
    # As if this commit were slower by far: reported, nothing more.
    row['ratio'] = 0.01
    stored.write()
    _, here, there, over = call()
    assert there.startswith('0.010') and float(over) == pytest.approx(float(here.split()[0]) / 0.01, abs=0.1)
    assert Results(file).rows == [row], 'only --store writes'
    row['scope'] = 'elsewhere'
    stored.write()
    assert call()[2:] == ['–', '–'], 'stored for another scope'
