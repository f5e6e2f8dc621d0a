"""Nothing here runs code from a checkpoint, or hands a shell a command made of what a user wrote."""

import ast
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ('slab_det', 'tools', 'benchmarks', 'configs') for path in (ROOT / folder).rglob('*.py')
) + [ROOT / 'setup.py']
SCRIPTS = sorted((ROOT / 'tools').glob('*.sh'))
# Names that load pickles, or run text as code or as a shell command, whatever their arguments are.
FORBIDDEN = {
    'eval',
    'exec',
    'compile',
    '__import__',
    'os.system',
    'os.popen',
    'subprocess.getoutput',
    'subprocess.getstatusoutput',
    'pickle.load',
    'pickle.loads',
    'pickle.Unpickler',
    'pandas.read_pickle',
    'joblib.load',
    'dill.load',
    'dill.loads',
    'shelve.open',
    'marshal.loads',
    'torch.hub.load',
    'yaml.load',
    'yaml.unsafe_load',
    'yaml.full_load',
    'mmengine.load',
    'mmengine.fileio.load',
}
# Names that need an argument to be safe.
TORCH_LOADS = {'torch.load', 'torch.hub.load_state_dict_from_url', 'torch.utils.model_zoo.load_url', 'load_url'}
SUBPROCESS = {f'subprocess.{name}' for name in ('run', 'call', 'check_call', 'check_output', 'Popen')}


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each local name stands for: `from torch import load as read` makes read torch.load."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f'{node.module}.{alias.name}' for alias in node.names}
    return names


def unsafe_calls(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = ast.unparse(node.func).partition('.')
        name = f'{names.get(first, first)}.{rest}'.rstrip('.')
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        text = ast.unparse(node)
        if name in FORBIDDEN:
            yield f'line {node.lineno}: {text}'
        elif name in TORCH_LOADS and keywords.get('weights_only') != 'True':
            yield f'line {node.lineno}: not weights_only=True: {text}'
        elif keywords.get('allow_pickle', 'False') != 'False' or keywords.get('weights_only', 'True') != 'True':
            yield f'line {node.lineno}: unpickles: {text}'
        elif keywords.get('shell', 'False') != 'False':
            yield f'line {node.lineno}: a shell: {text}'
        elif name in SUBPROCESS and (not node.args or is_text(node.args[0])):
            yield f'line {node.lineno}: a command as one string: {text}'


def is_text(node: ast.AST) -> bool:
    """Whether this is a string, or visibly makes one."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ('format', 'join')
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_source_loads_pickles_or_builds_shell_commands():
    assert len(SOURCES) > 50
    assert [f'{path.relative_to(ROOT)}, {call}' for path in SOURCES for call in unsafe_calls(path.read_text())] == []


@pytest.mark.parametrize(
    'source',
    [
        'import torch\ntorch.load(path)',
        'import torch\ntorch.load(path, weights_only=False)',
        'from torch import load as read\nread(path, map_location="cpu")',
        'import torch\ntorch.hub.load_state_dict_from_url(url)',
        'import pickle\nwith open(path, "rb") as file: x = pickle.load(file)',
        'from pickle import loads\nloads(text)',
        'import numpy as np\nnp.load(path, allow_pickle=True)',
        'import mmengine\nmmengine.load(path)',
        'eval(text)',
        'import os\nos.system("ls " + path)',
        'import subprocess\nsubprocess.run(command, shell=True)',
        'import subprocess as sp\nsp.run(f"ls {path}")',
        'import subprocess\nsubprocess.Popen(" ".join(command))',
        'from subprocess import check_output\ncheck_output("ls {}".format(path))',
    ],
)
def test_the_search_finds(source):
    assert len(list(unsafe_calls(source))) == 1


def test_the_search_lets_pass():
    assert not list(
        unsafe_calls(
            'import torch, subprocess\nmodel.eval()\ntorch.load(path, weights_only=True)\nsubprocess.run(["ls", path])'
        )
    )


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
    for program in ('python', 'torchrun', 'srun'):
        (programs / program).write_text(RECORDER)
        (programs / program).chmod(0o755)
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


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_a_script_stops_at_the_first_error_and_evaluates_no_text(script):
    text = script.read_text()
    assert '\nset -euo pipefail\n' in text and 'eval' not in text.split()
