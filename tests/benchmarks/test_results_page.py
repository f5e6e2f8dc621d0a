"""Pages show the numbers of benchmarks/results."""

import math
import re
import shutil
import statistics

import pytest

from benchmarks.absorb.size import table as size_table
from benchmarks.absorb.table import absorption_table
from benchmarks.gpu import tables as gpu_tables
from benchmarks.int8 import table as int8_table
from benchmarks.norms.run import publish
from benchmarks.norms.table import by_seed, replace_table, spread, study_table, t_interval
from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.runtimes import table as runtimes_table

PAGE = ROOT / 'benchmarks' / 'README.md'


@pytest.mark.parametrize('study', sorted(re.findall(r'^<!-- norms (\S+) -->$', PAGE.read_text(), re.MULTILINE)))
def test_a_table_is_that_of_the_stored_results(study, tmp_path):
    shutil.copy(PAGE, tmp_path)
    publish(study, tmp_path / PAGE.name, FOLDER)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text(), f'write the table of {study} again'


def test_every_stored_result_has_its_script_or_is_named_on_a_page():
    texts = [*(ROOT / 'benchmarks').rglob('*.py'), *(ROOT / 'docs').glob('*.md'), ROOT / 'README.md', PAGE]
    text = ''.join(path.read_text() for path in texts)
    for file in FOLDER.glob('*.json'):
        study = file.stem.removeprefix('norms_')
        # A study of norms has a table of this mark, or its name in a sentence.
        names = (f'<!-- norms {study} -->', f'`{study}`') if study != file.stem else (file.name,)
        assert any(name in text for name in names), file.name


def load(name: str) -> Results:
    return Results(FOLDER / f'{name}.json')


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the rows below a header, without bold."""
    lines = page[page.index(header) :].split('\n\n')[0].split('\n<!--')[0].splitlines()[2:]
    return [[cell.strip(' *') for cell in line.strip('|').split('|')] for line in lines]


def norm_studies() -> list[list[dict]]:
    """The rows of 2,000 iterations on BCCD and on DSB2018."""
    return [load(f'norms_{name}-norms-2000').rows for name in ('bccd', 'dsb2018')]


def test_norms_to_choose_from_are_the_stored_results():
    rows = table((ROOT / 'docs/norms.md').read_text(), '| norm | BCCD')
    assert len(rows) == 6
    for norm, *shown in rows:
        name = {'BatchNorm': 'TokenBN', 'PRepBN': 'PRepBN, linear'}.get(norm, norm)
        assert shown == [spread(by_seed(rows, name).values()) for rows in norm_studies()], norm


def test_readme_says_what_the_recommended_norm_and_absorption_change():
    readme, names = (ROOT / 'README.md').read_text(), ('BN+FFNBN', 'LayerNorm')
    pairs = [tuple(by_seed(rows, name) for name in names) for rows in norm_studies()]
    gains = [spread([new[seed] - old[seed] for seed in new], '{:+.1f}') for new, old in pairs]
    assert f'AP: {" and ".join(gains)} over' in readme
    for way, sentence in (('default', 'AP: {} and {};'), ('all gone', 'none left {} and {} |')):
        stored = [load(f'absorb_{name}_2000').rows for name in ('bccd', 'dsb2018')]
        means = [statistics.mean(by_seed(rows, way).values()) for rows in stored]
        teachers = [statistics.mean(by_seed(rows, 'teacher').values()) for rows in stored]
        changes = [f'{100 * (ap - teacher):+.1f}' for ap, teacher in zip(means, teachers, strict=True)]
        assert sentence.format(*changes) in readme, way


ABSORBED = {
    'BCCD, Faster R-CNN, box AP': 'bccd_2000',
    'DSB2018, Mask R-CNN, mask AP': 'dsb2018_2000',
    'DSB2018, 4,000 iterations': 'dsb2018_4000',
    'photographs, Faster R-CNN, box AP': 'animals_1000',
}


def absorbed() -> dict[str, list[dict]]:
    return {column: load(f'absorb_{name}').rows for column, name in ABSORBED.items()}


def test_absorbed_detectors_are_the_stored_results():
    shown = absorption_table(absorbed())
    assert shown in PAGE.read_text(), f'{PAGE} needs this table:\n{shown}'


def test_table_of_absorbed_detectors_compares_seed_by_seed():
    ap = dict(teacher=(0.5, 0.6, 0.7), default=(0.51, 0.58, 0.7), tuned=(0.4, 0.6))
    stored = [
        dict(name=way, seed=seed, AP=value, kept=['norm'] * seed)
        for way, values in ap.items()
        for seed, value in enumerate(values)
    ]
    rows = table(absorption_table({'BCCD': stored}), '| | BCCD |')
    first = ['60.0: 50.0, 60.0, 70.0', '59.7: +1.0, -2.0, +0.0', '0 to 2']
    assert [row[1] for row in rows] == [*first, *['–'] * 5, '-10.0, +0.0, –']


def test_what_absorption_costs_is_the_stored_result():
    ways = ('teacher', 'default', None, 'all gone')
    rows = table((ROOT / 'docs/absorb.md').read_text(), '| | BCCD, Faster')
    kept = table(absorption_table(absorbed()), '| | BCCD, Faster')[2]
    for (label, *shown), way in zip(rows, ways, strict=True):
        if way is None:
            assert [label, *shown] == kept
            continue
        for stored, value in zip(absorbed().values(), shown, strict=True):
            assert value == spread(by_seed(stored, way).values()), label


def test_size_of_an_absorption_is_the_stored_result():
    assert size_table(load('absorb_size')) in PAGE.read_text()


def test_steps_of_an_absorption_are_the_stored_results():
    stored = [load(f'absorb_ablation_{name}').rows for name in ('bccd', 'dsb2018')]
    for (label, *shown), *rows in zip(table(PAGE.read_text(), '| every norm gone'), *stored, strict=True):
        assert shown == [cell for row in rows for cell in (f'{100 * row["AP"]:.1f}', f'{row["agreement"]:.3f}')], label


def by_column(text: str) -> dict[str, dict[str, str]]:
    """The cells of a table by the name of the row and the title of the column."""
    titles = [cell.strip() for cell in text.splitlines()[0].strip('|').split('|')]
    return {row[0]: dict(zip(titles[1:], row[1:], strict=True)) for row in table(text, '| |')}


def check_part(shown: str, full: str) -> None:
    """Every cell of a page's table is that of the full one."""
    full_cells = by_column(full)
    for name, cells in by_column(shown).items():
        assert cells == {title: full_cells[name][title] for title in cells}, name


def test_tables_of_runtimes_are_the_stored_results():
    runtimes = load('runtimes')
    for scope in ('detector', 'backbone'):
        assert runtimes_table(runtimes.select(size='800x1216', scope=scope)) in PAGE.read_text()
    page = (ROOT / 'docs/latency.md').read_text()
    check_part(
        page[page.index('| | eager | deployed') :].split('\n\n')[0],
        runtimes_table(runtimes.select(size='800x1216', scope='detector')),
    )
    assert int8_table(load('int8').rows) in PAGE.read_text()


def test_tables_of_the_gpu_are_the_stored_results():
    tables = gpu_tables(load('gpu'))
    for title, stored in tables.items():
        assert stored in PAGE.read_text(), title
    page = (ROOT / 'docs/latency.md').read_text()
    check_part(page[page.index('| | eager, float32') :].split('\n\n')[0], tables['detectors'])


def test_latency_of_classifiers_is_the_stored_result():
    medians = {row['config']: row['median_ms'] for row in load('classifiers_cpu').rows}
    rows = table(PAGE.read_text(), '| | LayerNorm, ms | PRepBN')
    for name, ms, *ratios in rows:
        config = name.strip('`')
        base = medians.pop(f'configs/pretrain/{config}')
        assert ms == f'{base:.0f}', config
        for kind, ratio in zip(('prepbn', 'slab', 'un'), ratios, strict=True):
            other = medians.pop(f'configs/pretrain/{kind}_{config}', None)
            assert ratio == ('' if other is None else f'{other / base:.2f}'), (config, kind)
    assert rows and not medians


def test_table_compares_seed_by_seed():
    control, other = [0.512, 0.498, 0.530], [0.505, 0.499, 0.502]

    rows = [dict(name='LN', seed=seed, AP=ap) for seed, ap in zip((0, 1, 10), control, strict=True)]
    rows += [dict(name='BN', control='LN', seed=seed, AP=other[index]) for seed, index in ((10, 2), (0, 0), (1, 1))]
    first, second = table(study_table(rows, 'box AP'), '| run |')
    assert first == ['LN', '51.2, 49.8, 53.0', '51.3 ± 1.6', '–', '–']
    difference = [100 * (b - a) for a, b in zip(control, other, strict=True)]
    mean, std = statistics.mean(difference), statistics.stdev(difference)
    # 4.303 is the 97.5 % quantile of Student's t with two degrees of freedom.
    half = 4.303 * std / math.sqrt(3)
    assert second == [
        'BN',
        '50.5, 49.9, 50.2',
        '50.2 ± 0.3',
        f'{mean:+.1f} ± {std:.1f}',
        f'[{mean - half:+.1f}, {mean + half:+.1f}]',
    ]
    assert t_interval(difference[:2]) is None, 'two seeds have no interval'


def test_only_the_rows_below_the_mark_are_replaced(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('a | b\n<!-- one -->\n| old |\n| rows |\n\nwords\n<!-- two -->\n| last |\n')
    replace_table(page, 'one', '| new |')
    replace_table(page, 'two', '| end |\n| end |')
    assert page.read_text() == 'a | b\n<!-- one -->\n| new |\n\nwords\n<!-- two -->\n| end |\n| end |\n'
    with pytest.raises(ValueError, match='has no line <!-- three -->'):
        replace_table(page, 'three', '| new |')
