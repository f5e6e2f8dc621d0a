"""docs/reproduce-coco.md lists what the papers list, with what the configs start from."""

from __future__ import annotations

import math

import pytest
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.measure.report import PaperTable, describe_model, read_paper_tables

PAPER_TABLES = read_paper_tables(CONFIGS.parent / 'benchmarks' / 'paper_tables.json')
PAGE = (CONFIGS.parent / 'docs/reproduce-coco.md').read_text()
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_95 = {4: 2.776, 8: 2.306}


def rows() -> list[list[str]]:
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('| row |')) + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith('|'))
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines[start:end]]


def trained_as(table: PaperTable) -> list[str]:
    """The configs of the rows of a paper's table."""
    found = []
    for path in sorted(CONFIGS.glob('*_rcnn_*.py')):
        cfg = Config.fromfile(path)
        description = describe_model(cfg.model)
        if description['name'] in table.rows and (description['detector'], cfg.train_cfg.get('max_epochs')) == (
            table.detector,
            table.epochs,
        ):
            found.append(path.name)
    return found


@pytest.mark.parametrize('table', PAPER_TABLES, ids=lambda table: table.source)
def test_every_row_of_the_papers_is_there_with_its_numbers_and_its_start(table):
    author = table.source.split(' ')[0]
    listed = [row for row in rows() if row[2] == f'{author}, {table.source.split(", ")[-1]}']
    assert sorted(row[1].strip('`') for row in listed) == trained_as(table)
    for name, config, _, box, mask, start, same in listed:
        cfg = Config.fromfile(CONFIGS / config.strip('`'))
        backbone = cfg.model.backbone
        published = table.rows[name]
        assert float(box) == published['box'][0]
        assert mask == ('–' if published['mask'] is None else str(published['mask'][0]))
        owner, file = start.split(' ')
        assert f'/{owner}/' in backbone.init_cfg.checkpoint
        assert backbone.init_cfg.checkpoint.endswith(f'/{file.strip("`")}')
        norm, own_weights = describe_model(cfg.model)['norm'], 'prepbn' in file or 'slab' in file
        authors_weights = own_weights if norm == 'PRepBN' else norm == 'LN' and not name.startswith('Flatten')
        # The released detection code freezes statistics, and has a learning rate of its own for PVT-S.
        as_released = norm == 'LN' or backbone.get('norm_eval', False)
        assert same == ('yes' if authors_weights and as_released and not name.startswith('PVT-S') else 'no')


def test_the_tolerance_follows_from_the_spread():
    std = 0.1
    assert f'differ by {std * math.sqrt(2):.2f} ' in PAGE and f'more than {1.96 * std * math.sqrt(2):.2f} once' in PAGE
    for seeds in (3, 5):
        error = std * math.sqrt(2 / seeds)
        assert f'± {T_95[2 * seeds - 2] * error:.2f})' in PAGE
