"""Model index and docs/models.md name every config, and give no number that is not the papers' own."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import yaml
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.measure.report_file import describe_model

ROOT = CONFIGS.parent
PAPER_TABLES = json.loads((ROOT / 'benchmarks' / 'paper_tables.json').read_text())
INDEX = yaml.safe_load((ROOT / 'model-index.yml').read_text())
METAFILES = {path: yaml.safe_load((ROOT / path).read_text()) for path in INDEX['Import']}
MODELS = {model['Name']: model for metafile in METAFILES.values() for model in metafile['Models']}
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
PAGE = (ROOT / 'docs/models.md').read_text()
# What the papers call the sizes.
SIZES = {
    'Swin-96x2262': 'Swin-T',
    'Swin-96x22182': 'Swin-S',
    'PVT-2222': 'PVT-T',
    'PVT-3463': 'PVT-S',
    'CSwin-12211': 'CSWin-T',
    'CSwin-24181': 'CSWin-T',
}


@cache
def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / f'{name}.py')


def describe(cfg: Config) -> dict[str, str]:
    """What a report says of a model, with the row label of the papers."""
    description = describe_model(cfg.model)
    for label, size in SIZES.items():
        description['name'] = description['name'].replace(label, size)
    return description


def published(name: str) -> dict[tuple[str, str], float]:
    """{(table, metric): number} of the papers' rows that were trained as the config says."""
    cfg = load(name)
    description = describe(cfg)
    numbers = {}
    for table in PAPER_TABLES:
        row, conditions = table['rows'].get(description['name']), (table['detector'], table['epochs'])
        if row is None or conditions != (description['detector'], cfg.train_cfg.get('max_epochs')):
            continue
        values = {'box AP': row['box'][0], 'mask AP': row['mask'] and row['mask'][0], 'V100 ms/image': row['ms']}
        numbers.update({(table['source'], metric): value for metric, value in values.items() if value is not None})
    return numbers


def test_every_config_has_exactly_one_entry_in_a_metafile_of_the_index():
    assert sorted(METAFILES) == sorted(f'configs/{path.name}' for path in CONFIGS.glob('metafile*.yml'))
    entries = [model for metafile in METAFILES.values() for model in metafile['Models']]
    assert sorted(model['Config'] for model in entries) == sorted(f'configs/{name}.py' for name in NAMES)
    assert sorted(model['Name'] for model in entries) == NAMES
    collections = [collection for metafile in METAFILES.values() for collection in metafile['Collections']]
    names = [collection['Name'] for collection in collections]
    assert sorted(names) == sorted({model['In Collection'] for model in entries})
    assert all((ROOT / collection['Code']['File']).exists() for collection in collections)


@pytest.mark.parametrize('name', NAMES)
def test_entry_says_what_the_config_does_and_what_the_papers_report(name):
    entry, cfg = MODELS[name], load(name)
    metadata, description = entry['Metadata'], describe(cfg)
    assert metadata['Row'] == description['name']
    for key, length in (('Epochs', 'max_epochs'), ('Iterations', 'max_iters')):
        assert metadata.get(key) == cfg.train_cfg.get(length)
    detectors = {architecture.replace(' ', '').replace('-', '') for architecture in metadata['Architecture']}
    assert description['detector'] in detectors
    # Nothing was measured on COCO, and there are no weights of ours.
    assert not {'Weights', 'Results'} & {*entry}
    results = [
        ((result['Reported By'], metric), value)
        for result in entry.get('Paper Results', [])
        for metric, value in result['Metrics'].items()
    ]
    assert sorted(results) == sorted(published(name).items())


def expand(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for, as a shell has it."""
    match = re.search(r'\{([^}]*)\}', pattern)
    if match is None:
        return [pattern]
    return [name for word in match[1].split(',') for name in expand(pattern.replace(match[0], word, 1))]


def test_models_page_names_every_config():
    named = {name for pattern in re.findall('`(.*?)`', PAGE) for name in expand(pattern)}
    assert not {f'{name}.py' for name in NAMES} - named


def test_models_page_gives_the_numbers_of_the_papers():
    lines = PAGE[PAGE.index('| row | config') :].split('\n\n')[0].splitlines()
    titles, _, *rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    for row in (dict(zip(titles, cells, strict=True)) for cells in rows):
        numbers = {}
        for file in expand(row['config in `configs/`'].strip('`')):
            name = file.removesuffix('.py')
            assert (row['row'], row['epochs']) == (describe(load(name))['name'], str(load(name).train_cfg.max_epochs))
            numbers.update({(name.split('_')[0], metric): str(value) for (_, metric), value in published(name).items()})
        mask = [numbers[key] for key in (('mask', 'box AP'), ('mask', 'mask AP')) if key in numbers]
        assert row['paper: Mask R-CNN box / mask AP'] == (' / '.join(mask) or '–'), row
        assert row['paper: Faster R-CNN box AP'] == numbers.get(('faster', 'box AP'), '–'), row
        assert row['paper: ms (V100)'] == numbers.get(('mask', 'V100 ms/image'), '–'), row


@pytest.mark.parametrize('table', PAPER_TABLES, ids=lambda table: table['source'])
def test_every_row_of_a_paper_has_a_config(table):
    trained = {describe(load(name))['name'] for name in NAMES if (table['source'], 'box AP') in published(name)}
    assert trained == table['rows'].keys()
