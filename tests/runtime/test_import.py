"""``import slab_det`` registers classes, supplies operators, and changes nothing else of torch and OpenMMLab."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slab_det
from slab_det.runtime.ops import TorchvisionOps

ROOT = Path(__file__).parents[2]

# Compares modules, classes and registries of the libraries before and after the import.
CHECK = """
import os, sys, warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

class Operators(ModuleType):
    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return print

import mmcv
if WITH_OPERATORS:
    mmcv._ext = sys.modules['mmcv._ext'] = Operators('mmcv._ext')
    sys.modules['mmcv._ext'].__spec__ = ModuleSpec('mmcv._ext', loader=None)
    import mmdet.apis, mmdet.datasets, mmdet.evaluation, mmdet.models
import mmengine.infer, mmengine.runner, torch._dynamo, torch.distributed, torch.onnx, torch.utils.checkpoint
import mmdet.registry, pycocotools.coco, pycocotools.cocoeval
# torchvision registers operators of its own with torch.onnx.
import torchvision
from mmengine.registry import Registry

LIBRARIES = ('torch', 'mmengine', 'mmcv', 'mmdet', 'pycocotools')

def library_state():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition('.')[0] not in LIBRARIES or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and str(value.__module__).partition('.')[0] in LIBRARIES:
                found.update({(value, field): member for field, member in vars(value).items()})
            if isinstance(value, Registry):
                found.update({(name, key, entry): target for entry, target in value._module_dict.items()})
    backends = mmengine.fileio.backends.registry_utils.backends
    found.update({('backend', prefix): backend for prefix, backend in backends.items()})
    return found

def process_state():
    return dict(
        meta_path=[*sys.meta_path], path=[*sys.path], environ=dict(os.environ), filters=[*warnings.filters],
        threads=torch.get_num_threads(), random=torch.get_rng_state().tolist(),
        safe=torch.serialization.get_safe_globals(), schemes=dict(mmengine.runner.CheckpointLoader._schemes),
    )

before, old_process, old_modules = library_state(), process_state(), set(sys.modules)
import slab_det
after = library_state()
for key, value in process_state().items():
    if value != old_process[key]:
        print('changed', key)
for key, value in before.items():
    # Adding a scheme replaces _schemes, whose entries process_state() compares. Numbers may count calls.
    if key[-1] not in ('_schemes', '__warningregistry__') and not isinstance(value, (int, str, float, tuple)):
        if after.get(key) is not value:
            print('changed', key)
for owner, name, *entry in after.keys() - before.keys():
    if owner in old_modules and not entry and not isinstance(after[owner, name], ModuleType):
        print('added', owner, name)
print('imported', *{'mmdet.models', 'mmdet.datasets', 'timm', 'matplotlib', 'scipy'} & sys.modules.keys() - old_modules)
from mmdet.registry import DATASETS, HOOKS, MODELS
names = dict.fromkeys(['SLABSwin', 'SLABPVT', 'FusedDetector', 'DistilledDetector', 'PRepBN'], MODELS)
names |= dict(SyntheticShapes=DATASETS, RecalibrateFuseHook=HOOKS)
print('missing', *(name for name, registry in names.items() if registry.get(name).__name__ != name))
print('missing', *(name for name in slab_det.__all__ if getattr(slab_det, name).__name__ != name))
print('operators', type(mmcv._ext).__name__)
print('file', slab_det.__file__)
"""
# A command, and a worker that is spawned and not forked, which imports the program of the command again.
WORKER = """
import multiprocessing, sys
from slab_det_command import run

def look():
    import slab_det
    from mmengine.registry import HOOKS
    print(HOOKS.get('RecalibrateFuseHook').__name__)

if __name__ == '__main__':
    sys.argv[1:] = ['--help']
    try:
        run('fuse')
    except SystemExit:
        multiprocessing.get_context('spawn').Process(target=look).start()
"""
MMDET_PRINTS = 'Could not import OneDL. Skipping OneDL datasets.'


@pytest.mark.parametrize(('with_operators', 'name'), [(True, 'slab-det'), (False, 'train.py')])
def test_import_changes_only_registries_and_missing_operators(with_operators: bool, name: str, tmp_path: Path) -> None:
    """With operators, mmdet is imported before slab_det; without them, slab_det must import no slow module.

    The programs have names of our own, in a project that has slab_det beside its own folder tools/.
    """
    if not with_operators and not isinstance(sys.modules['mmcv._ext'], TorchvisionOps):
        pytest.skip('mmcv has compiled operators')
    package, program = tmp_path / 'slab_det', tmp_path / 'tools' / name
    package.symlink_to(ROOT / 'slab_det')
    program.parent.mkdir()
    program.write_text(CHECK.replace('WITH_OPERATORS', str(with_operators)))
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    # CHECK accesses deprecated names of torch.
    command = [sys.executable, '-W', 'ignore::FutureWarning', program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = [line.strip() for line in done.stdout.splitlines() if line != MMDET_PRINTS]
    operators = 'Operators' if with_operators else 'TorchvisionOps'
    expected = ['imported', 'missing', 'missing', f'operators {operators}', f'file {package}/__init__.py']
    assert lines == expected, done.stdout
    assert not done.stderr


def test_classes_are_registered_in_the_workers_of_a_command(tmp_path: Path) -> None:
    (tmp_path / 'fuse.py').write_text(WORKER)
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / 'fuse.py'], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1:] == ['RecalibrateFuseHook'], done.stderr


def test_public_functions_are_listed() -> None:
    assert {*slab_det.__all__, 'fusion', 'inference'} <= {*dir(slab_det)}
