"""docs/architecture.md is true: packages import as its picture says. The examples of docs/extend.md run."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pkgutil import iter_modules

import pytest
from conftest import CONFIGS
from mmdet.registry import MODELS

from slab_det.attention import WINDOW_ATTENTIONS

DOCS = CONFIGS.parent / 'docs'
PACKAGE = CONFIGS.parent / 'slab_det'
PAGE = (DOCS / 'architecture.md').read_text()
EXTEND = (DOCS / 'extend.md').read_text()
# How far below the top of the picture the name of each package stands.
HEIGHTS = {
    package: int(y)
    for y, package in re.findall(
        r'<text x="\d+" y="(\d+)" [^>]*font-weight="bold"[^>]*>(\w+)<', (DOCS / 'architecture.svg').read_text()
    )
}


@cache
def find_imports() -> dict[str, set[str]]:
    """The packages that the modules of each package import, also inside functions."""
    imports = defaultdict(set)
    for path in PACKAGE.rglob('*.py'):
        package = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f'{path}: a relative import'
                names = [f'{node.module}.{alias.name}' for alias in node.names]
            else:
                continue
            imports[package] |= {name.split('.')[1] for name in names if name.startswith('slab_det.')} & HEIGHTS.keys()
    return {package: imports[package] - {package} for package in HEIGHTS}


def test_picture_and_page_show_every_room():
    packages = {name for _, name, _ in iter_modules([str(PACKAGE)]) if not name.startswith('_')}
    assert packages == HEIGHTS.keys()
    assert packages <= set(re.findall(r'^\| `(\w+)', PAGE, flags=re.MULTILINE))


@pytest.mark.parametrize('package', HEIGHTS)
def test_imports_go_down_in_the_picture(package):
    imports = find_imports()[package]
    assert all(HEIGHTS[other] > HEIGHTS[package] for other in imports), f'{package} imports {sorted(imports)}'


def test_norms_and_attention_import_no_other_room():
    imports = find_imports()
    assert imports['norms'] == imports['attention'] == set()


EXAMPLES = dict(re.findall(r'^## (Add [^\n]+)\n.*?^```python\n(.*?)^```', EXTEND, flags=re.MULTILINE | re.DOTALL))


def test_page_has_its_examples():
    assert list(EXAMPLES) == ['Add a norm', 'Add an attention', 'Add a backbone', 'Add a model of another library']


@pytest.mark.parametrize('title', EXAMPLES)
def test_example_runs(title: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(DOCS.parent)
    # The classes of an example are registered for the example alone; what is imported on demand, for all tests.
    MODELS.import_from_location()
    monkeypatch.setattr(MODELS, '_module_dict', dict(MODELS.module_dict))
    monkeypatch.setitem(WINDOW_ATTENTIONS, 'cosine', None)
    exec(compile(EXAMPLES[title], title, 'exec'), {'__name__': 'example'})
