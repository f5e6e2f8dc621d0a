"""tools/venv.sh stops where it must not go on, and the lock that it installs has everything that is required."""

import fcntl
import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parents[1]


def test_two_set_ups_of_one_environment_run_one_after_the_other(tmp_path):
    (tmp_path / 'venv').mkdir()
    (tmp_path / 'venv' / 'thesis.tex').touch()
    variables = {**os.environ, 'SLAB_DET_VENV': str(tmp_path / 'venv')}
    with open(tmp_path / 'venv.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen([ROOT / 'tools/venv.sh'], env=variables, stderr=subprocess.PIPE, text=True) as second:
            assert 'Waiting for another set-up' in second.stderr.readline() and second.poll() is None
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert 'choose another SLAB_DET_VENV' in second.communicate(timeout=60)[1] and second.returncode == 1
    assert os.listdir(tmp_path / 'venv') == ['thesis.tex'], 'a folder that it did not make is left alone'


def test_unsuitable_python_is_named(tmp_path):
    variables = {**os.environ, 'SLAB_DET_VENV': str(tmp_path / 'venv'), 'PYTHON': 'false'}
    result = subprocess.run([ROOT / 'tools/venv.sh'], env=variables, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, '')
    assert 'false is not one' in result.stderr and '3.10 to 3.13' in result.stderr


def locked() -> list[tuple[Requirement, int]]:
    """Each line of the lock that names a version, and how many hashes follow it."""
    text = re.sub(r'^#.*\n', '', (ROOT / 'requirements/lock.txt').read_text(), flags=re.MULTILINE)
    entries = re.split(r'\n(?=\w)', text.strip())
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
