"""Model index and docs/models.md name every config, and give no number that is not the papers' own."""

from __future__ import annotations

import re

import pytest
import yaml

from benchmarks.model_index import (
    CONFIGS,
    NAMES,
    PAPER_TABLES,
    ROOT,
    describe,
    find_metafile,
    generate,
    load,
    published,
)

PAGE = (ROOT / 'docs/models.md').read_text()


def expand(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for, as a shell has it."""
    match = re.search(r'\{([^}]*)\}', pattern)
    if match is None:
        return [pattern]
    return [name for word in match[1].split(',') for name in expand(pattern.replace(match[0], word, 1))]


def test_metafiles_are_those_of_the_configs_and_the_papers() -> None:
    texts = generate()
    assert {CONFIGS / find_metafile(name) for name in NAMES} == texts.keys()
    imported = yaml.safe_load((ROOT / 'model-index.yml').read_text())['Import']
    assert sorted(imported) == sorted(f'configs/{path.name}' for path in texts)
    for path, text in texts.items():
        assert path.read_text() == text, f'python -m benchmarks.model_index writes {path}'
        assert (ROOT / yaml.safe_load(text)['Collections'][0]['Code']['File']).exists()


def test_models_page_names_every_config_and_gives_the_numbers_of_the_papers() -> None:
    named = {name for pattern in re.findall('`(.*?)`', PAGE) for name in expand(pattern)}
    assert not {f'{name}.py' for name in NAMES} - named
    lines = PAGE[PAGE.index('| row | config') :].split('\n\n')[0].splitlines()
    titles, _, *rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    for row in (dict(zip(titles, cells, strict=True)) for cells in rows):
        numbers = {}
        for file in expand(row['config in `configs/`'].strip('`')):
            name = file.removesuffix('.py')
            assert (row['row'], row['epochs']) == (describe(name)['name'], str(load(name).train_cfg.max_epochs))
            for values in published(name).values():
                numbers.update({(name.split('_')[0], metric): str(value) for metric, value in values.items()})
        mask = [numbers[key] for key in (('mask', 'box AP'), ('mask', 'mask AP')) if key in numbers]
        assert row['paper: Mask R-CNN box / mask AP'] == (' / '.join(mask) or '–'), row
        assert row['paper: Faster R-CNN box AP'] == numbers.get(('faster', 'box AP'), '–'), row
        assert row['paper: ms (V100)'] == numbers.get(('mask', 'V100 ms/image'), '–'), row


@pytest.mark.parametrize('table', PAPER_TABLES, ids=lambda table: table['source'])
def test_every_row_of_a_paper_has_a_config(table: dict) -> None:
    trained = {describe(name)['name'] for name in NAMES if table['source'] in published(name)}
    assert trained == table['rows'].keys()
