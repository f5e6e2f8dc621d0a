"""Packages import as docs/extend.md says, and its examples run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest
from conftest import CONFIGS
from mmdet.registry import MODELS

from slab_det.attention import WINDOW_ATTENTIONS
from slab_det.export import check_parity, export_onnx, load_runtime, random_images

DOCS = CONFIGS.parent / 'docs'
PACKAGE = CONFIGS.parent / 'slab_det'
# From the top; no package imports one of its own layer or of a higher one.
LAYERS = (
    ('cli',),
    ('optimization',),
    ('inference',),
    ('export',),
    ('hooks', 'absorption'),
    ('measure', 'conversion', 'preflight'),
    ('fusion', 'recalibration'),
    ('families',),
    ('backbones',),
    ('checkpoints', 'data', 'compare'),
    ('attention',),
    ('norms',),
    ('runtime',),
    ('common',),
)
HEIGHTS = {package: -depth for depth, layer in enumerate(LAYERS) for package in layer}
EXAMPLES = dict(
    re.findall(
        r'^## (Add [^\n]+)\n.*?^```python\n(.*?)^```', (DOCS / 'extend.md').read_text(), re.MULTILINE | re.DOTALL
    )
)
assert EXAMPLES


def find_imports(package: str) -> set[str]:
    """The packages that the modules of a package import, also inside functions."""
    names: set[str] = set()
    for path in (PACKAGE / package).rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f'{path}: a relative import'
                names |= {f'{node.module}.{alias.name}' for alias in node.names}
    return {name.split('.')[1] for name in names if name.startswith('slab_det.')} & HEIGHTS.keys() - {package}


def test_every_package_has_its_layer() -> None:
    assert HEIGHTS.keys() == {name for _, name, is_package in iter_modules([str(PACKAGE)]) if is_package}


@pytest.mark.parametrize('package', HEIGHTS)
def test_a_package_imports_lower_layers_only(package: str) -> None:
    imports = find_imports(package)
    assert all(HEIGHTS[other] < HEIGHTS[package] for other in imports), f'{package} imports {sorted(imports)}'


@pytest.mark.parametrize('package', HEIGHTS)
def test_no_function_hides_a_module(package: str) -> None:
    names = [name for _, name, _ in iter_modules([str(PACKAGE / package)])]
    found = import_module(f'slab_det.{package}')
    hidden = [name for name in names if not isinstance(getattr(found, name, None), ModuleType | None)]
    assert not hidden, f'slab_det.{package} has these as modules and as functions'


@pytest.mark.parametrize('package', ['absorption', 'conversion'])
def test_changing_norms_needs_no_inference(package: str) -> None:
    assert not {'inference', 'export'} & find_imports(package)


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function: runs the example of a title."""
    monkeypatch.chdir(DOCS.parent)
    # The classes of an example are registered for the example alone; what is imported on demand, for all tests.
    MODELS.import_from_location()
    monkeypatch.setattr(MODELS, '_module_dict', dict(MODELS.module_dict))
    monkeypatch.setitem(WINDOW_ATTENTIONS, 'cosine', None)
    return lambda title: exec(compile(EXAMPLES[title], title, 'exec'), {'__name__': 'example'})


@pytest.mark.parametrize('title', EXAMPLES)
def test_example_runs(title: str, run_example: Callable[[str], None]) -> None:
    run_example(title)


def test_the_attention_of_the_example_is_exported(run_example, small_detector, tmp_path: Path) -> None:
    run_example('Add an attention')
    detector = small_detector(attention='cosine', depths=(1, 1, 1, 1))
    export_onnx(detector, tmp_path / 'model.onnx', 'backbone')
    checks = check_parity(
        detector, load_runtime(tmp_path / 'model.onnx', threads=1), random_images([(64, 96), (131, 75)])
    )
    assert [check.what for check in checks] == ['64x96', '131x75']
