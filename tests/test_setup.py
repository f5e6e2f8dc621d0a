"""tools/venv.sh stops where it must not go on, and the locks that it installs have everything that is required."""

import fcntl
import os
import re
import subprocess
import sys
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


def locked(name: str) -> list[tuple[Requirement, int]]:
    """Each line of a lock that names a version, and how many hashes follow it."""
    text = re.sub(r'^#.*\n', '', (ROOT / f'requirements/{name}.txt').read_text(), flags=re.MULTILINE)
    entries = re.split(r'\n(?=\w)', text.strip())
    return [(Requirement(entry.partition('\\')[0].strip()), entry.count('--hash=sha256:')) for entry in entries]


def declared(name: str) -> list[Requirement]:
    """What a lock must have: the requirements of the package, and those of the extras that the lock is for."""
    settings = read_configuration(ROOT / 'pyproject.toml', expand=False)['project']
    extras = dict(run=('openvino', 'serve'), test=('test',), docs=('docs',))[name]
    lines = [line for extra in extras for line in settings['optional-dependencies'][extra]]
    return [Requirement(line) for line in lines + settings['dependencies'] * (name != 'docs')]


@pytest.mark.parametrize('platform', [('linux', 'x86_64'), ('linux', 'aarch64'), ('darwin', 'arm64')], ids=str)
@pytest.mark.parametrize('version', ['3.10', '3.11', '3.12', '3.13'])
@pytest.mark.parametrize('name', ['run', 'test', 'docs'])
def test_a_lock_has_one_hashed_version_of_everything_that_pyproject_asks_for(name, version, platform):
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
    for requirement, num_hashes in locked(name):
        specifiers = list(requirement.specifier)
        assert [specifier.operator for specifier in specifiers] == ['=='] and num_hashes, requirement
        assert requirement.url is None, requirement
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in pinned, f'{requirement.name} is pinned twice'
            pinned[requirement.name] = specifiers[0].version
    for requirement in declared(name):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert pinned.get(requirement.name) in requirement.specifier, f'run tools/lock.sh: {requirement}'


def test_locks_agree_and_leave_what_only_a_gpu_needs_to_its_own():
    names = ('run', 'gpu', 'test', 'docs')
    run, gpu, test, docs = ({(line.name, str(line.specifier)) for line, _ in locked(name)} for name in names)
    assert run | gpu | docs <= test and not run & gpu and 'triton' in dict(gpu) and 'torch' in dict(run)
    assert 'opencv-python-headless' not in dict(test), 'opencv-python has the same files'
    assert not dict(docs).keys() & {'torch', 'onedl-mmdetection'}


PIP = """
import sys
if '-c' in sys.argv:
    raise SystemExit
with open({log!r}, 'a') as log:
    print(*sys.argv[1:], file=log)
    log.writelines(open(sys.argv[-1]) if sys.argv[-1].endswith('.txt') else [])
print('Collecting one (from somewhere)')
raise SystemExit({broken!r} if {broken!r} else 0)
"""


@pytest.fixture
def fake(tmp_path):
    """A function that runs venv.sh with an interpreter whose pip writes down what it is given."""

    def run(*arguments, broken='', **variables):
        log, python = tmp_path / 'pip.log', tmp_path / 'python'
        log.write_text('')
        (tmp_path / 'pip.py').write_text(PIP.format(log=str(log), broken=broken))
        python.write_text(f"""#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p "$4/bin"
    printf '#!/bin/sh\\nexec {sys.executable} {tmp_path}/pip.py "$@"\\n' > "$4/bin/python"
    chmod +x "$4/bin/python"
else
    exec {sys.executable} "$@"
fi
""")
        python.chmod(0o755)
        known = dict(os.environ, SLAB_DET_VENV=str(tmp_path / 'venv'), PYTHON=str(python), **variables)
        result = subprocess.run([ROOT / 'tools/venv.sh', *arguments], env=known, capture_output=True, text=True)
        return result, log.read_text()

    return run


def test_parts_are_added_to_one_environment_and_pip_is_one_line(fake):
    first, installed = fake()
    assert first.returncode == 0 and 'run.txt' in installed and 'test.txt' not in installed, first.stderr
    assert len(first.stderr.splitlines()) < 8, first.stderr
    assert fake()[1] == '', 'a whole environment is used as it is'
    second, installed = fake('test')
    assert second.stdout == first.stdout and 'test.txt' in installed and 'run.txt' not in installed
    assert fake('test')[1] == ''


def test_another_index_for_torch_leaves_out_what_only_its_cuda_build_needs(fake):
    _, installed = fake(SLAB_DET_TORCH_INDEX='file:///elsewhere')
    first, *rest = installed.splitlines()
    assert '--index-url file:///elsewhere' in first
    assert {line.partition('==')[0] for line in rest if re.match('(torch|nvidia|cuda|triton)', line)} == {
        'torch',
        'torchvision',
    }
    hashed = installed.partition('--require-hashes')[2]
    assert 'timm==' in hashed and not re.search('^(torch|torchvision|nvidia-.*|triton)==', hashed, re.MULTILINE)


def test_what_pip_says_is_shown_where_it_fails(fake):
    result, _ = fake(broken='ERROR: HASHES DO NOT MATCH')
    assert result.returncode == 1 and 'HASHES DO NOT MATCH' in result.stderr
    assert 'cannot install the versions of requirements/run.txt' in result.stderr
    assert 'Setting up' in fake()[0].stderr, 'what is not whole is made again'
