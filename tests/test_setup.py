"""tools/venv.sh, with an interpreter that only pretends to make environments and to install."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parents[1]
LOCK = Path('requirements/lock.txt')

# Answers `-m venv DIR` and `-m pip ...`, and is the real interpreter for the rest. Notes what it was asked for in
# $LOG, and its last arguments, one a line, in $LOG.last; `pip install` first waits while $LOG.wait exists and fails if
# $LOG.fail does.
INTERPRETER = f"""#!/usr/bin/env bash
set -eu
[[ $1 == -m ]] || exec {sys.executable} "$@"
echo "$2 ${{3:-}}" >>"$LOG"
[[ $3 != install ]] || printf '%s\\n' "$@" >"$LOG.last"
case $2 in
venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
pip)
    while [[ -e $LOG.wait ]]; do sleep 0.05; done
    [[ $3 != install || ! -e $LOG.fail ]]
    [[ $3 != install ]] || touch "$(dirname "$0")/installed"
    ;;
esac
"""


# The tree lies in a folder whose name a shell would run.
HOSTILE = 'a b; touch pwned; $(touch pwned) `touch pwned` & "c\'d'


class Sandbox:
    """Runs a copy of venv.sh, in a tree of its own, with the pretended interpreter on a pretended machine."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.log, self.venv = folder / HOSTILE, folder / 'log', folder / 'the venv'
        for path in (Path('tools/venv.sh'), Path('pyproject.toml'), LOCK):
            (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, self.tree / path)
        programs = folder / 'bin'
        programs.mkdir()
        for program, content in (('python', INTERPRETER), ('uname', '#!/bin/sh\necho "${UNAME:-Linux x86_64}"\n')):
            (programs / program).write_text(content)
            (programs / program).chmod(0o755)
        self.environment = {
            **os.environ,
            'PYTHON': str(programs / 'python'),
            'SLAB_DET_VENV': str(self.venv),
            'LOG': str(self.log),
            'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}',
        }
        self.environment.pop('SLAB_DET_LOCK', None)

    def start(self, **environment: str) -> subprocess.Popen:
        pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return subprocess.Popen([self.tree / 'tools' / 'venv.sh'], env=self.environment | environment, **pipes)

    def run(self, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(**environment)
        stdout, stderr = process.communicate(timeout=120)
        return subprocess.CompletedProcess([], process.returncode, stdout, stderr)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def installed(self) -> list[str]:
        """The arguments of the last `pip install`."""
        return Path(f'{self.log}.last').read_text().splitlines()[3:]

    def installations(self) -> int:
        return self.calls().count('pip install')


@pytest.fixture
def sandbox(tmp_path):
    yield Sandbox(tmp_path)
    assert not list(tmp_path.rglob('pwned')) and not Path('pwned').exists()


def test_environment_is_made_once_from_the_pinned_versions(sandbox):
    first, second = sandbox.run(), sandbox.run()
    assert first.stdout == second.stdout == f'{sandbox.venv}\n'
    assert sandbox.calls() == [f'venv {sandbox.venv}', 'pip install']
    assert sandbox.installed() == ['--require-hashes', '--no-deps', '-r', str(sandbox.tree / LOCK)]


@pytest.mark.parametrize(
    ('environment', 'why'),
    [
        (dict(SLAB_DET_LOCK='off'), 'SLAB_DET_LOCK=off'),
        (dict(UNAME='FreeBSD amd64'), 'no versions are pinned for FreeBSD amd64'),
    ],
)
def test_without_a_lock_that_fits_it_installs_what_pyproject_allows_and_says_so(sandbox, environment, why):
    result = sandbox.run(**environment)
    assert result.returncode == 0 and why in result.stderr, result
    assert sandbox.installed() == ['-e', f'{sandbox.tree}[test]']
    # The environment holds no checkout.
    assert sandbox.calls()[-1] == 'pip uninstall'


def test_a_failed_installation_names_the_way_around_and_heals(sandbox):
    fail = Path(f'{sandbox.log}.fail')
    fail.touch()
    result = sandbox.run()
    assert (result.returncode, result.stdout, sandbox.installations()) == (1, '', 1)
    assert 'SLAB_DET_LOCK=off' in result.stderr and 'hashes do not match' in result.stderr
    fail.unlink()
    assert sandbox.run().stdout == f'{sandbox.venv}\n'


@pytest.mark.parametrize(('changed', 'lock'), [(LOCK, 'on'), (Path('pyproject.toml'), 'off')], ids=str)
def test_a_changed_requirement_makes_another_environment_outside_the_tree(sandbox, tmp_path, changed, lock):
    def place() -> str:
        environment = dict(SLAB_DET_VENV='', XDG_CACHE_HOME=str(tmp_path / 'cache'), SLAB_DET_LOCK=lock)
        return sandbox.run(**environment).stdout

    before = place()
    assert before.startswith(str(tmp_path / 'cache' / 'slab_det' / 'venv-py3.'))
    assert place() == before and sandbox.installations() == 1
    with (sandbox.tree / changed).open('a') as file:
        file.write('# changed\n')
    after = place()
    assert after != before and sandbox.installations() == 2


def test_killed_set_up_heals(sandbox):
    wait = Path(f'{sandbox.log}.wait')
    wait.touch()
    process = sandbox.start()
    deadline = time.monotonic() + 60
    while not sandbox.installations():
        assert time.monotonic() < deadline, sandbox.calls()
        time.sleep(0.02)
    process.kill()
    process.wait()
    leftover = sandbox.venv / 'half a package'
    leftover.touch()
    # The pip that lived on still holds the lock.
    again = sandbox.start()
    time.sleep(0.3)
    assert again.poll() is None and sandbox.installations() == 1, sandbox.calls()
    wait.unlink()
    assert again.communicate(timeout=120)[0] == f'{sandbox.venv}\n'
    assert sandbox.installations() == 2 and not leftover.exists()


def test_foreign_folder_is_left_alone(sandbox):
    sandbox.venv.mkdir()
    (sandbox.venv / 'thesis.tex').touch()
    result = sandbox.run()
    assert result.returncode == 1 and 'choose another SLAB_DET_VENV' in result.stderr
    assert (sandbox.venv / 'thesis.tex').exists() and sandbox.calls() == []


def test_unsuitable_python_is_named(sandbox, tmp_path):
    old = tmp_path / 'python3.9'
    old.write_text('#!/usr/bin/env bash\nexit 1\n')
    old.chmod(0o755)
    result = sandbox.run(PYTHON=str(old))
    assert (result.returncode, result.stdout) == (1, '')
    assert str(old) in result.stderr and '3.10 to 3.13' in result.stderr


def locked() -> list[tuple[Requirement, int]]:
    """Each line of the lock that names a version, and how many hashes follow it."""
    entries = re.split(r'\n(?=\w)', re.sub(r'^#.*\n', '', (ROOT / LOCK).read_text(), flags=re.MULTILINE).strip())
    return [(Requirement(entry.partition('\\')[0].strip()), entry.count('--hash=sha256:')) for entry in entries]


def declared() -> list[Requirement]:
    """The requirements of the package and of its tests."""
    settings = read_configuration(ROOT / 'pyproject.toml')['project']
    return [Requirement(line) for line in settings['dependencies'] + settings['optional-dependencies']['test']]


@pytest.mark.parametrize('platform', [('linux', 'x86_64'), ('linux', 'aarch64'), ('darwin', 'arm64')], ids=str)
@pytest.mark.parametrize('version', ['3.10', '3.11', '3.12', '3.13'])
def test_the_lock_has_one_hashed_version_of_everything_that_pyproject_asks_for(version, platform):
    environment = dict(
        python_version=version,
        python_full_version=f'{version}.1',
        sys_platform=platform[0],
        platform_machine=platform[1],
        platform_system=platform[0].title(),
        os_name='posix',
        extra='',
    )
    pinned = {}
    for requirement, num_hashes in locked():
        specifiers = list(requirement.specifier)
        assert [specifier.operator for specifier in specifiers] == ['=='] and num_hashes, requirement
        assert requirement.url is None, requirement
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in pinned, f'{requirement.name} is pinned twice'
            pinned[requirement.name] = specifiers[0].version
    for requirement in declared():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert pinned.get(requirement.name) in requirement.specifier, f'run tools/lock.sh: {requirement}'
