"""The source distribution and the wheel made from it hold configs and tools, and work without the repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.cli import COMMANDS

ROOT = CONFIGS.parent
UNFORMATTED = Path(__file__).parent / 'unformatted'
PIP = ('-m', 'pip', '-q', '--disable-pip-version-check')
# What mmengine makes of slab_det's names; the config has the scope of slab_det, and everything of it is mmdet's.
CHECK = """
import slab_det
from mmengine.config import Config
from mmengine.hub import get_config, get_model
from mmengine.runner import Runner
from slab_det.cli.config import read_config

slab = 'slab_det::slab/quickstart_mask_rcnn_slab_swin.py'
assert get_model(slab).backbone.__class__ is slab_det.backbones.SLABSwin
assert read_config(slab).model.type == 'MaskRCNN'
# setup.py moves configs into folders because of this alone.
try:
    get_config('slab_det::quickstart_mask_rcnn_slab_swin.py')
except ValueError as error:
    assert 'relative config path' in str(error)
else:
    raise AssertionError('mmengine finds configs without a folder: setup.py can copy them')
cfg = Config.fromfile('mine.py')
assert cfg.custom_hooks[0]._scope_ == 'slab_det'
Runner.from_cfg(cfg).train_loop
print(slab_det.__file__)
"""
MINE = """
_base_ = 'slab_det::slab/quickstart_mask_rcnn_slab_swin.py'
work_dir = 'run'
generator = dict(num_train=4, num_val=2, size=(96, 80))
train_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(generator=generator))
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(generator=generator))
"""


def run(*command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def copy_sources(tree: Path) -> None:
    for name in ('benchmarks', 'configs', 'examples', 'slab_det', 'tools'):
        shutil.copytree(ROOT / name, tree / name)
    for file in (ROOT / 'LICENSE', *ROOT.glob('*.*')):
        if file.is_file():
            shutil.copy(file, tree)


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed; the wheel is made from the source distribution alone."""
    folder = tmp_path_factory.mktemp('wheel')
    tree = folder / 'tree'
    copy_sources(tree)
    # What `python -m build` does in its own environment.
    run('-c', f'from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})', folder=tree)
    shutil.rmtree(tree)
    (source,) = folder.glob('slab_det-*.tar.gz')
    with tarfile.open(source) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert {
        'CHANGELOG.md',
        'LICENSE',
        'README.md',
        'examples/serve_onnx.py',
    } <= names and 'benchmarks/results' not in names
    run(*PIP, 'wheel', '--no-deps', '--no-build-isolation', '--no-index', '-w', folder, source, folder=folder)
    (wheel,) = folder.glob('slab_det-*.whl')
    run(*PIP, 'install', '--no-deps', '--no-index', '--target', folder / 'site', wheel, folder=folder)
    return folder / 'site'


def test_the_description_leads_nowhere_that_is_only_in_the_repository(site: Path) -> None:
    (metadata,) = site.glob('slab_det-*.dist-info/METADATA')
    text = metadata.read_text()
    readme = (ROOT / 'README.md').read_text()
    assert text.count('\n## ') == readme.count('\n## ') and '](docs/' not in text and '![' not in text
    assert '](https://arxiv.org' in text and 'Project-URL: Paper' in text
    assert {'opencv-python', 'pillow', 'safetensors'} <= set(
        re.findall(r'^Requires-Dist: ([\w-]+)', text, re.MULTILINE)
    )


def test_every_config_is_in_the_wheel_and_means_what_it_means_in_the_repository(site: Path) -> None:
    installed = {path.name: path for path in (site / 'slab_det/.mim/configs').glob('[!_]*/*.py')}
    assert installed.keys() == {path.name for pattern in ('*.py', 'pretrain/*.py') for path in CONFIGS.glob(pattern)}
    for path in installed.values():
        bases = re.findall(r"'(\.\.?/[^']+\.py)'", path.read_text())
        assert bases and not [base for base in bases if not (path.parent / base).is_file()], path
    for name in ('faster_rcnn_un_swin_t_3x.py', 'mask_rcnn_slab_swin_t_official.py'):
        assert Config.fromfile(installed[name]).to_dict() == Config.fromfile(CONFIGS / name).to_dict(), name


def test_mmengine_finds_configs_and_models_by_their_names(site: Path, tmp_path: Path) -> None:
    (tmp_path / 'mine.py').write_text(MINE)
    done = run('-c', CHECK, folder=tmp_path, PYTHONPATH=f'{site}:{UNFORMATTED}', SLAB_DET_CACHE=str(tmp_path / 'cache'))
    assert done.stdout.splitlines()[-1] == str(site / 'slab_det/__init__.py')
    assert 'WARN' not in done.stdout + done.stderr, done.stdout + done.stderr


def test_an_editable_installation_has_the_same_names_for_the_configs_of_its_checkout(tmp_path: Path) -> None:
    tree, site = tmp_path / 'tree', tmp_path / 'site'
    copy_sources(tree)
    run(*PIP, 'install', '--no-deps', '--no-build-isolation', '--target', site, '-e', tree, folder=tmp_path)
    base = tree / 'configs/_base_/prepbn.py'
    base.write_text(base.read_text() + "\nwork_dir = 'edited'\n")
    (tmp_path / 'mine.py').write_text("_base_ = ['slab_det::swin/mask_rcnn_swin_t.py', 'slab_det::_base_/prepbn.py']")
    # A .pth file counts in folders of packages alone.
    check = f"""
import site; site.addsitedir({str(site)!r})
import slab_det
from mmengine.config import Config

cfg = Config.fromfile('mine.py')
assert cfg.model.backbone.type == 'SLABSwin' and cfg.custom_hooks and cfg.work_dir == 'edited'
print(slab_det.__file__)
"""
    done = run('-c', check, folder=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.splitlines()[-1] == str(tree / 'slab_det/__init__.py')


def test_the_command_is_installed_and_lists_the_others(site: Path, tmp_path: Path) -> None:
    done = run(site / 'bin/slab-det', folder=tmp_path, PYTHONPATH=str(site))
    assert {*COMMANDS} <= {*done.stdout.split()}
    usage = run(site / 'bin/slab-det', 'quickstart', '--help', folder=tmp_path, PYTHONPATH=str(site)).stdout
    assert usage.startswith('usage: slab-det quickstart ')


@pytest.mark.parametrize('program', [('bin/slab-det', 'fuse'), ('slab_det/.mim/tools/fuse.py',)])
def test_help_of_an_installation_imports_no_torch(site: Path, tmp_path: Path, program: tuple[str, ...]) -> None:
    file, *name = program
    done = run('-X', 'importtime', site / file, *name, '--help', folder=tmp_path, PYTHONPATH=str(site))
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}
    assert 'slab_det_command' in imported and not imported & {'torch', 'mmengine'}
