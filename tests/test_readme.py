"""What the documentation tells a reader to type, to copy or to click is there, and its Python runs."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import CONFIGS, randomize
from mmdet.registry import MODELS
from mmengine.config import Config
from setuptools.config.pyprojecttoml import read_configuration
from test_model_index import expand

import slab_det
from slab_det.fusion import save_fused

ROOT = CONFIGS.parent
PAGES = [ROOT / 'README.md', ROOT / 'benchmarks/README.md', *sorted((ROOT / 'docs').glob('*.md'))]
# What a shell script of ours hands its arguments to.
BEHIND = {
    'tools/dist_train.sh': 'tools/train.py',
    'tools/dist_test.sh': 'tools/test.py',
}


def shell_lines(text: str) -> list[str]:
    """Every command of a page: the lines of its bash blocks, joined where they go on, and commands within sentences."""
    blocks = re.findall(r'^```bash\n(.*?)^```', text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace('\\\n', ' ').splitlines()]
    spans = re.findall(r'`([^`]+)`', re.sub(r'^```.*?^```', '', text, flags=re.MULTILINE | re.DOTALL))
    spans = [' '.join(span.split()) for span in spans]
    lines += [span for span in spans if re.match(r'(python|make|tools/\S+\.sh)\s', span)]
    # A sentence may leave out where a tool lies.
    lines += [f'python tools/{span}' for span in spans if re.match(r'\w+\.py\s', span)]
    return [line for line in lines if line.strip() and not line.lstrip().startswith('#')]


def commands() -> list:
    lines = {line: page.name for page in PAGES for line in shell_lines(page.read_text())}
    # An expression that finds none would leave nothing to fail.
    assert any(line.startswith('python -m benchmarks.') for line in lines) and len(lines) > 20
    return [
        pytest.param(shlex.split(line, comments=True), id=f'{page}: {" ".join(shlex.split(line, comments=True))}')
        for line, page in lines.items()
    ]


@pytest.fixture
def flags_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[[str], set[str]]:
    """The flags that a script takes, as its --help prints them, without paying for a new interpreter."""

    def flags(script: str) -> set[str]:
        monkeypatch.setattr(sys, 'argv', [script, '--help'])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / script), run_name='__main__')
        assert not stop.value.code
        return set(re.findall(r'(?<![\w-])--[a-z][\w-]*', capsys.readouterr().out))

    return flags


@pytest.mark.parametrize('command', commands())
def test_command_names_what_exists(command: list[str], flags_of: Callable[[str], set[str]]) -> None:
    # Variables set for the command alone.
    program, *arguments = [word for word in command if not re.match(r'[A-Z_]+=', word)]
    if program == 'make':
        targets = re.findall(r'^([a-z]+):', (ROOT / 'Makefile').read_text(), flags=re.MULTILINE)
        assert arguments and set(arguments) <= set(targets)
        return
    if program == 'srun':
        # Slurm's own flags come first.
        program, arguments = 'python', arguments[arguments.index('-u') + 1 :]
    if program == 'pip':
        settings = read_configuration(ROOT / 'pyproject.toml', expand=False)['project']
        extras = re.fullmatch(r'install -e \.(?:\[([\w,]+)\])?', ' '.join(arguments))[1]
        assert {*(extras or 'serve').split(',')} <= settings['optional-dependencies'].keys()
        return
    script = arguments.pop(0) if program == 'python' else program
    if script == '-m':
        script = f'{arguments.pop(0).replace(".", "/")}.py'
    assert re.match(r'(tools|benchmarks)/', script) and (ROOT / script).is_file(), f'{script} is not there'
    flags = [argument.partition('=')[0] for argument in arguments if argument.startswith('--')]
    assert set(flags) <= flags_of(BEHIND.get(script, script)), f'{script} has other flags'
    for argument in arguments:
        if argument.startswith('configs/'):
            assert not [name for name in expand(argument) if not (ROOT / name).is_file()], argument


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link.partition('#')[0] for link in re.findall(r'\]\(([^)\s]+)\)', text) if '://' not in link]
    assert not [link for link in links if link and not (page.parent / link).exists()]
    # Paths in sentences are relative to the repository.
    named = re.findall(r'(?<![\w/.-])((?:configs|tools|benchmarks|docs|tests|slab_det)/[\w./{},-]*[\w}/])', text)
    assert not [name for path in named for name in expand(path) if not (ROOT / name).exists()]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r'^```python\n(.*?)^```', page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_config_of_the_norms_page_needs_nothing_else(tmp_path: Path) -> None:
    (block,) = (block for block in python_blocks(ROOT / 'docs/norms.md') if '_base_' in block)
    (tmp_path / 'config.py').write_text(block)
    cfg = Config.fromfile(tmp_path / 'config.py')
    assert [hook.type for hook in cfg.custom_hooks] == ['RecalibrateFuseHook']
    cfg.model.backbone.init_cfg = None
    report = slab_det.fuse(MODELS.build(cfg.model).eval(), inplace=True).fusion_report
    assert report.select('folded') and not report.select('affine'), str(report)


# Configs, docs/extend.md and docs/get-started.md have tests of their own; other pages import or define what they use.
BLOCKS = [
    pytest.param(block, id=f'{page.relative_to(ROOT)} {index}')
    for page in PAGES
    if page.name not in ('extend.md', 'get-started.md')
    for index, block in enumerate(python_blocks(page))
    if '_base_' not in block
]


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_run_cfg: Callable) -> Path:
    """Where a reader would stand: a config with a trained checkpoint, pictures, and what a run has left."""
    monkeypatch.chdir(tmp_path)
    meta = slab_det.data.SyntheticShapes.METAINFO
    layernorm, prepbn = small_run_cfg(norm_cfg=dict(type='LN')), small_run_cfg()
    layernorm.dump('config.py')
    weights = randomize(MODELS.build(layernorm.model)).state_dict()
    torch.save(dict(state_dict=weights, meta=dict(dataset_meta=meta)), 'layernorm.pth')
    Path('FOLDER').mkdir()
    form = dict(
        key='deployed', runtime='torch', precision='float32', variant=[], files=['../config.py', '../layernorm.pth']
    )
    content = dict(schema=1, recommended='deployed', device='cpu', threads=1, max_loss=0.5, forms=[form])
    Path('FOLDER/optimize.json').write_text(json.dumps(content))
    detector = MODELS.build(prepbn.model).eval()
    slab_det.set_gamma(detector, 0)
    Path('work_dirs/quickstart').mkdir(parents=True)
    save_fused(slab_det.fuse(detector), prepbn, 'work_dirs/quickstart/fused.pth', meta)
    Path('photos').mkdir()
    rng = np.random.default_rng(0)
    for file in ('photo.jpg', *(f'photos/{i}.png' for i in range(6))):
        cv2.imwrite(file, cv2.resize(rng.integers(0, 255, (9, 9, 3), np.uint8), (96, 80)))
    return tmp_path


@pytest.mark.parametrize('block', BLOCKS)
def test_python_of_a_page_runs(
    block: str, readers_folder: Path, small_detector: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its students take most of the time; tests/absorption tests the search.
    monkeypatch.setattr('slab_det.absorption.absorption.find_least_share', lambda *_: 0.9)
    model = small_detector(norm_cfg=dict(type='PRepBN'))
    model.cfg = Config.fromfile('config.py')  # as init_detector leaves it
    given = dict(torch=torch, slab_det=slab_det, model=model)
    images = [torch.rand(1, 3, 64, 96) for _ in range(2)]
    exec(compile(block, 'block', 'exec'), {'__name__': 'block', **given, 'images': images})
