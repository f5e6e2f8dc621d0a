"""The shell scripts hand no shell a command made of what a user wrote.

Rules of ruff hold the same for Python, and that nothing loads pickles: see pyproject.toml. Checkpoints that would run
code are in tests/runtime/test_checkpoint_files.py; here, what a reader of the README does with one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import RunsCode

SCRIPTS = sorted((Path(__file__).parents[1] / 'tools').glob('*.sh'))
# Spaces, and what a shell would run.
HOSTILE = 'a b; touch pwned; $(touch pwned) `touch pwned` & *'
# Stands for the programs that the scripts start, and notes its arguments.
RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"$NOTES"\n'
CALLS = {
    'dist_train.sh': [HOSTILE, '2', f'--work-dir={HOSTILE}'],
    'dist_test.sh': [HOSTILE, HOSTILE, '2', f'--work-dir={HOSTILE}'],
}


@pytest.mark.parametrize('name', CALLS)
def test_a_script_passes_its_arguments_on_as_they_are(tmp_path, name):
    # The scripts themselves lie in such a folder, and so do the programs.
    tools, programs, here = (tmp_path / HOSTILE / folder for folder in ('tools', 'programs', 'here'))
    for folder in (tools, programs, here):
        folder.mkdir(parents=True)
    for script in SCRIPTS:
        shutil.copy(script, tools)
    (programs / 'python').write_text(RECORDER)
    (programs / 'python').chmod(0o755)
    environment = {
        **os.environ,
        'NOTES': str(tmp_path / 'notes'),
        'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}',
    }
    environment.pop('PYTHON', None)
    result = subprocess.run(
        [tools / name, *CALLS[name]], cwd=here, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    notes = (tmp_path / 'notes').read_text().splitlines()
    assert notes.count(HOSTILE) == CALLS[name].count(HOSTILE) and f'--work-dir={HOSTILE}' in notes, notes
    assert any(note.startswith(str(tools)) for note in notes), notes
    assert not list(tmp_path.rglob('pwned')) and list(here.iterdir()) == []


def test_the_snippet_of_the_readme_runs_no_code_of_a_checkpoint(tmp_path, small_run_cfg):
    readme = (Path(__file__).parents[1] / 'README.md').read_text()
    (snippet,) = re.findall(r'^```python\n(import slab_det.*?^model = init_detector\(.*?)$', readme, re.M | re.S)
    small_run_cfg().dump(tmp_path / 'config.py')
    proof = tmp_path / 'it ran'
    torch.save({'state_dict': RunsCode(os.mkdir, str(proof))}, tmp_path / 'layernorm.pth')
    result = subprocess.run([sys.executable, '-c', snippet], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert 'CheckpointError: layernorm.pth: holds posix.mkdir' in result.stderr and not proof.exists(), result.stderr
