"""What the documentation tells a reader to type or to click is there."""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CONFIGS
from test_model_index import expand

ROOT = CONFIGS.parent
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
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
    assert any(line.startswith('python benchmarks/') for line in lines) and len(lines) > 20
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
    program, *arguments = itertools.dropwhile(re.compile(r'[A-Z_]+=').match, command)
    if program == 'make':
        targets = re.findall(r'^([a-z]+):', (ROOT / 'Makefile').read_text(), flags=re.MULTILINE)
        assert arguments and set(arguments) <= set(targets)
        return
    if program == 'srun':
        # Slurm's own flags come first.
        program, arguments = 'python', arguments[arguments.index('-u') + 1 :]
    if program == 'pip':
        assert arguments == ['install', '-e', '.'] and (ROOT / 'setup.py').is_file()
        return
    script = arguments.pop(0) if program == 'python' else program
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
    # Paths in sentences are those of the repository.
    named = re.findall(r'(?<![\w/.-])((?:configs|tools|benchmarks|docs|tests|slab_det)/[\w./{},-]*[\w}/])', text)
    assert not [name for path in named for name in expand(path) if not (ROOT / name).exists()]
