"""tools/venv.sh, with an interpreter that only pretends to make environments and to install."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / 'tools' / 'venv.sh'

# Answers `-m venv DIR` and `-m pip ...`, and is the real interpreter for the rest. Notes what it was asked for in
# $LOG; `pip install` first waits while $LOG.wait exists and fails if $LOG.fail does.
INTERPRETER = f"""#!/usr/bin/env bash
set -eu
[[ $1 == -m ]] || exec {sys.executable} "$@"
echo "$2 ${{3:-}}" >>"$LOG"
case $2 in
venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
pip)
    while [[ -e $LOG.wait ]]; do sleep 0.05; done
    [[ $3 != install || ! -e $LOG.fail ]]
    [[ $3 != install ]] || touch "$(dirname "$0")/installed"
    ;;
esac
"""


class Sandbox:
    """Runs venv.sh with the pretended interpreter."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / 'log'
        self.venv = folder / 'the venv'
        python = folder / 'python'
        python.write_text(INTERPRETER)
        python.chmod(0o755)
        self.environment = {**os.environ, 'PYTHON': str(python), 'SLAB_DET_VENV': str(self.venv), 'LOG': str(self.log)}

    def start(self, **environment: str) -> subprocess.Popen:
        return subprocess.Popen([SCRIPT], env=self.environment | environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)

    def run(self, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(**environment)
        stdout, stderr = process.communicate(timeout=30)
        return subprocess.CompletedProcess([], process.returncode, stdout, stderr)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_for(self, call: str) -> None:
        deadline = time.monotonic() + 20
        while call not in ' '.join(self.calls()):
            assert time.monotonic() < deadline, f'never called {call}: {self.calls()}'
            time.sleep(0.02)


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def installations(sandbox):
    return sandbox.calls().count('pip install')


def test_prints_only_the_path(sandbox):
    result = sandbox.run()
    assert (result.returncode, result.stdout) == (0, f'{sandbox.venv}\n'), result.stderr
    assert (sandbox.venv / 'bin' / 'installed').exists()


def test_environment_is_made_once_and_holds_no_checkout(sandbox):
    first, second = sandbox.run(), sandbox.run()
    assert first.stdout == second.stdout == f'{sandbox.venv}\n'
    assert sandbox.calls() == [f'venv {sandbox.venv}', 'pip install', 'pip uninstall']


def test_failed_installation_is_an_error_and_heals(sandbox):
    fail = Path(f'{sandbox.log}.fail')
    fail.touch()
    broken = sandbox.run()
    assert broken.returncode != 0 and broken.stdout == '', broken
    fail.unlink()
    assert sandbox.run().stdout == f'{sandbox.venv}\n'
    assert installations(sandbox) == 2


def test_killed_set_up_heals(sandbox):
    wait = Path(f'{sandbox.log}.wait')
    wait.touch()
    process = sandbox.start()
    sandbox.wait_for('pip install')
    process.kill()
    process.wait()
    leftover = sandbox.venv / 'half a package'
    leftover.touch()
    # The pip that lived on still holds the lock.
    again = sandbox.start()
    time.sleep(0.3)
    assert again.poll() is None and installations(sandbox) == 1, sandbox.calls()
    wait.unlink()
    assert again.communicate(timeout=30)[0] == f'{sandbox.venv}\n'
    assert installations(sandbox) == 2 and not leftover.exists()


def test_two_set_ups_at_once_make_one_environment(sandbox):
    processes = [sandbox.start() for _ in range(3)]
    assert {process.communicate(timeout=30)[0] for process in processes} == {f'{sandbox.venv}\n'}
    assert installations(sandbox) == 1


def test_environment_whose_interpreter_is_gone_is_made_again(sandbox):
    sandbox.run()
    (sandbox.venv / 'bin' / 'python').unlink()
    assert sandbox.run().returncode == 0
    assert installations(sandbox) == 2


def test_foreign_folder_is_left_alone(sandbox):
    sandbox.venv.mkdir()
    (sandbox.venv / 'thesis.tex').touch()
    result = sandbox.run()
    assert result.returncode == 1 and 'choose another SLAB_DET_VENV' in result.stderr
    assert (sandbox.venv / 'thesis.tex').exists() and sandbox.calls() == []


def test_default_place_is_outside_the_tree(sandbox, tmp_path):
    result = sandbox.run(SLAB_DET_VENV='', XDG_CACHE_HOME=str(tmp_path / 'cache'))
    version = f'py{sys.version_info.major}.{sys.version_info.minor}-'
    assert result.stdout.startswith(str(tmp_path / 'cache' / 'slab_det' / f'venv-{version}')), result


def test_unsuitable_python_is_named(sandbox, tmp_path):
    old = tmp_path / 'python3.9'
    old.write_text('#!/usr/bin/env bash\nexit 1\n')
    old.chmod(0o755)
    result = sandbox.run(PYTHON=str(old))
    assert result.returncode == 1 and str(old) in result.stderr and '3.10 to 3.13' in result.stderr
    assert result.stdout == ''
