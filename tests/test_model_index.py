"""Model index and pages name every config, and give no number that is not the paper's or measured."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import yaml
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.measure.report import describe_model

ROOT = CONFIGS.parent
PAPER_TABLES = json.loads((ROOT / 'benchmarks' / 'paper_tables.json').read_text())
INDEX = yaml.safe_load((ROOT / 'model-index.yml').read_text())
METAFILES = {path: yaml.safe_load((ROOT / path).read_text()) for path in INDEX['Import']}
COLLECTIONS = [collection for metafile in METAFILES.values() for collection in metafile['Collections']]
MODELS = {model['Name']: model for metafile in METAFILES.values() for model in metafile['Models']}
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
README = (ROOT / 'README.md').read_text()
# What the papers call the sizes.
SIZES = {
    'Swin-96x2262': 'Swin-T',
    'Swin-96x22182': 'Swin-S',
    'PVT-2222': 'PVT-T',
    'PVT-3463': 'PVT-S',
    'CSwin-12211': 'CSWin-T',
    'CSwin-24181': 'CSWin-T',
}
TASKS = {'Object Detection': 'box AP', 'Instance Segmentation': 'mask AP'}


@cache
def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / f'{name}.py')


def describe(cfg: Config) -> dict[str, str]:
    """What a report says of a model, with the row label of the papers."""
    description = describe_model(cfg.model)
    for label, size in SIZES.items():
        description['name'] = description['name'].replace(label, size)
    return description


def published(cfg: Config) -> dict[tuple[str, str], float]:
    """{(table, metric): number} of the rows that were trained as ``cfg`` says."""
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


def test_every_collection_has_a_paper_code_and_models():
    names = [collection['Name'] for collection in COLLECTIONS]
    assert len(names) == len(set(names))
    assert set(names) == {model['In Collection'] for model in MODELS.values()}
    for collection in COLLECTIONS:
        assert collection['Paper']['URL'].startswith('https://') and collection['Paper']['Title']
        assert (ROOT / collection['Code']['File']).exists() and (ROOT / collection['README']).is_file()


@pytest.mark.parametrize('name', NAMES)
def test_entry_says_what_the_config_does_and_what_the_papers_report(name):
    entry, cfg = MODELS[name], load(name)
    metadata, description = entry['Metadata'], describe(cfg)
    assert metadata['Row'] == description['name']
    for key, length in (('Epochs', 'max_epochs'), ('Iterations', 'max_iters')):
        assert metadata.get(key) == cfg.train_cfg.get(length)
    assert ('Mask R-CNN' in metadata['Architecture']) == (description['detector'] == 'MaskRCNN')
    assert ('Faster R-CNN' in metadata['Architecture']) == (description['detector'] == 'FasterRCNN')
    assert metadata['Training Data'] == ('SyntheticShapes' if name.startswith('quickstart') else 'COCO')
    hooks = {hook.type: hook for hook in cfg.get('custom_hooks', [])}
    recalibrates = 'RecalibrateFuseHook' in hooks and hooks['RecalibrateFuseHook'].get('recalibrate', True)
    assert ('Recalibration' in metadata['Training Techniques']) == recalibrates
    crops = any(transform.type == 'RandomChoice' for transform in cfg.train_dataloader.dataset.pipeline)
    assert ('Multi-scale' in metadata['Training Techniques']) == crops
    numbers = {}
    for result in entry.get('Paper Results', []):
        assert result['Dataset'] == 'COCO val2017'
        assert TASKS[result['Task']] in result['Metrics']
        for metric, value in result['Metrics'].items():
            assert (result['Reported By'], metric) not in numbers
            numbers[result['Reported By'], metric] = value
    assert numbers == published(cfg)


def test_no_results_and_no_weights_are_claimed():
    """Nothing was measured on COCO, and there are no weights of ours."""
    assert not [name for name, model in MODELS.items() if {'Weights', 'Results'} & {*model}]


def expand(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for, as a shell has it."""
    match = re.search(r'\{([^}]*)\}', pattern)
    if match is None:
        return [pattern]
    return [name for word in match[1].split(',') for name in expand(pattern.replace(match[0], word, 1))]


def table_rows(page: str, header: str) -> list[dict[str, str]]:
    """The rows of a page's table by column; its first line begins with ``header``."""
    lines = page[page.index(header) :].split('\n\n')[0].splitlines()
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


MODELS_PAGE = (ROOT / 'docs/models.md').read_text()
ROWS = table_rows(MODELS_PAGE, '| row | config')


def test_models_page_lists_every_config_once():
    others = MODELS_PAGE.partition('Without a number of a paper: ')[2].split('\n\n')[0]
    patterns = [row['config in `configs/`'].strip('`') for row in ROWS] + re.findall('`(.*?)`', others)
    listed = [name for pattern in patterns for name in expand(pattern)]
    quickstart = expand(re.search(r'`(quickstart_mask_rcnn_\{.*?)`', MODELS_PAGE)[1])
    assert sorted(listed + quickstart) == sorted(f'{name}.py' for name in NAMES)


def test_models_page_gives_the_numbers_of_the_papers():
    for row in ROWS:
        names = expand(row['config in `configs/`'].strip('`'))
        numbers = {}
        for name in names:
            cfg = load(name.removesuffix('.py'))
            assert row['row'] == describe(cfg)['name']
            assert row['epochs'] == str(cfg.train_cfg.max_epochs)
            fuses = any(hook.type == 'RecalibrateFuseHook' for hook in cfg.get('custom_hooks', []))
            left = 'four LayerNorms' if 'out_norm_cfg' in cfg.model.backbone else 'none' if fuses else 'all'
            assert row['norms left'] == left
            numbers.update({(name.split('_')[0], metric): value for (_, metric), value in published(cfg).items()})
        mask = [str(numbers[key]) for key in (('mask', 'box AP'), ('mask', 'mask AP')) if key in numbers]
        assert row['paper: Mask R-CNN box / mask AP'] == (' / '.join(mask) or '–')
        assert row['paper: Faster R-CNN box AP'] == str(numbers.get(('faster', 'box AP'), '–'))
        assert row['paper: ms (V100)'] == str(numbers.get(('mask', 'V100 ms/image'), '–'))


@pytest.mark.parametrize('table', PAPER_TABLES, ids=lambda table: table['source'])
def test_models_page_says_which_rows_train_as_published(table):
    trained = [name for name in NAMES if (table['source'], 'box AP') in published(load(name))]
    assert sorted({describe(load(name))['name'] for name in trained}) == sorted(table['rows'])
    for row in ROWS:
        for name in {name.removesuffix('.py') for name in expand(row['config in `configs/`'].strip('`'))} & {*trained}:
            backbone, label = load(name).model.backbone, row['row']
            file = backbone.init_cfg.checkpoint.split('/')[-1]
            norm, own_weights = backbone.get('norm_cfg', {'type': 'LN'})['type'], 'prepbn' in file or 'slab' in file
            authors_weights = own_weights if norm == 'PRepBN' else norm == 'LN' and not label.startswith('Flatten')
            # The released detection code freezes statistics, and has a learning rate of its own for PVT-S.
            as_released = norm == 'LN' or backbone.get('norm_eval', False)
            same = authors_weights and as_released and not label.startswith('PVT-S')
            assert row['as published'] == ('yes' if same else 'no'), name
