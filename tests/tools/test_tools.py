"""The command lines as a user meets them: help, and errors in one line."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from mmengine.logging import MMLogger

TOOLS = Path(__file__).parents[2] / 'tools'
MAIN_CONFIG = TOOLS.parent / 'configs' / 'mask_rcnn_slab_swin_t.py'


@dataclass
class Outcome:
    """What a command line leaves behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Outcome]:
    """Runs a tool as ``python tools/<tool> …`` would, in an empty folder, without paying for a new interpreter."""
    monkeypatch.chdir(tmp_path)

    def run(tool: str, *arguments: object) -> Outcome:
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, arguments)])
        # A new process would have no logger yet; that of the last call writes to a stream that is closed.
        monkeypatch.setattr(MMLogger, '_instance_dict', {})
        code: object = 0
        try:
            runpy.run_path(str(TOOLS / tool), run_name='__main__')
        except SystemExit as stop:
            code = stop.code
        return Outcome(int(code or 0), *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ('tool', 'flags'),
    [
        ('train.py', '--work-dir --amp --resume --auto-scale-lr --cfg-options --launcher --data-root'),
        ('test.py', '--work-dir --out --show --show-dir --wait-time --tta --latency --size --rounds --fuse --report'),
        ('latency.py', '--checkpoint --fuse --rounds --warmup --size --scope --device --dtype --compile --json'),
        ('fuse.py', '--out'),
        ('convert_checkpoint.py', '--config --data-root --num-images --schedule'),
        ('report.py', '--out --paper'),
        ('quickstart.py', '--work-dir'),
    ],
)
def test_help_names_the_flags(tool: str, flags: str, call) -> None:
    result = call(tool, '--help')
    assert result.code == 0, result.err
    assert not [flag for flag in flags.split() if flag not in result.out]


def test_training_without_coco_says_how_to_get_it(tmp_path: Path) -> None:
    """In a process of its own: exit code and stderr are what a shell sees."""
    command = [sys.executable, TOOLS / 'train.py', MAIN_CONFIG]
    environment = {**os.environ, 'PYTHONPATH': str(TOOLS.parent)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-8:][0].startswith('error: train annotation file data/coco/annotations/')
    assert 'make quickstart' in result.stderr
    assert 'Traceback' not in result.stderr
    assert not list(tmp_path.iterdir()), 'nothing is written before the data is there'


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (['train.py', 'nowhere.py'], 'nowhere.py'),
        (['train.py', MAIN_CONFIG, '--data-root', 'nowhere'], '--data-root nowhere is not a folder'),
        (['test.py', MAIN_CONFIG, 'nowhere.pth'], 'checkpoint nowhere.pth not found'),
        (['fuse.py', MAIN_CONFIG, 'nowhere.pth', '--out', 'x.pth'], 'checkpoint nowhere.pth not found'),
        (['convert_checkpoint.py', 'nowhere.pth', 'b.pth', '--config', MAIN_CONFIG, '--num-images', 0],
         'checkpoint nowhere.pth not found'),
        (['latency.py', MAIN_CONFIG, '--checkpoint', 'a', 'b'], '1 configs but 2 checkpoints'),
        (['report.py', 'nowhere.json', '--out', 'x'], 'nowhere.json not found'),
    ],
)
def test_expected_errors_are_one_line(command: list, message: str, call) -> None:
    result = call(*command)
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith('error: ')
    assert message in result.err
    assert 'Traceback' not in result.err


def test_report_writes_table_and_picture(tmp_path: Path, call) -> None:
    shared = {
        'name': 'SLAB-Swin-T',
        'norm': 'PRepBN',
        'attention': 'sla',
        'detector': 'MaskRCNN',
        'variant': 'fused',
        'config': 'a.py',
    }
    latency = {
        'median_ms': 5.0,
        'scope': 'detector',
        'size': [8, 9],
        'dtype': 'float32',
        'device': 'CPU',
        'device_type': 'cpu',
        'threads': 1,
        'compiled': False,
        'rounds': 1,
        'warmup': 0,
    }
    for name, extra in (('a.json', {'ap': {'bbox': {'AP': 0.5}}}), ('b.json', {'latency': latency})):
        (tmp_path / name).write_text(json.dumps({'schema': 1, 'entries': [{**shared, **extra}]}))
    result = call('report.py', 'a.json', 'b.json', '--out', 'out', '--paper')
    assert result.code == 0, result.err
    assert '| SLAB-Swin-T | PRepBN | fused | 5.0 | 50.0 /' in (tmp_path / 'out' / 'table.md').read_text()
    assert (tmp_path / 'out' / 'ap_latency.png').read_bytes().startswith(b'\x89PNG')
