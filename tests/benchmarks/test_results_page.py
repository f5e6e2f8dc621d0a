"""Pages show the numbers of benchmarks/results."""

import math
import re
import shutil
import statistics

import pytest

from benchmarks.absorb import ruler
from benchmarks.absorb.grid import table as grid_table
from benchmarks.absorb.size import table as size_table
from benchmarks.absorb.table import absorption_table, students_table
from benchmarks.cpu_forms import table as forms_table
from benchmarks.gpu import tables as gpu_tables
from benchmarks.int8 import table as int8_table
from benchmarks.norms.run import publish
from benchmarks.norms.table import by_seed, replace_table, spread, study_table, t_interval
from benchmarks.quickstart import table as quickstart_table
from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.runtimes import channels_table, processors_table, ratios_table
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


def test_the_tables_of_the_ruler_are_those_of_the_stored_results():
    rows = load('ruler').rows
    assert ruler.summary_table(rows) in PAGE.read_text() and ruler.students_table(rows) in PAGE.read_text()


@pytest.mark.parametrize(('page', 'title'), [(PAGE, 'box AP'), (ROOT / 'docs/absorb.md', 'BCCD, box AP')])
def test_channels_and_their_ap_are_the_stored_results(page, title):
    teacher, *shown = table(page.read_text(), f'| multiply-adds left | agreement | {title}')
    stored = load('absorb_bccd_600').rows
    assert teacher[2] == f'{100 * stored[0]["AP"]:.1f}' and stored[0]['name'] == 'teacher'
    rows = [row for row in stored if 'share' in row]
    assert shown == [[f'{row["share"]:.2f}', f'{row["agreement"]:.3f}', f'{100 * row["AP"]:.1f}'] for row in rows]


def test_the_optimized_detector_of_the_readme_is_the_stored_one():
    rows = load('optimize_bccd').rows
    (best,) = (row for row in rows if row['recommended'])
    (base,) = (row for row in rows if row['name'] == 'eager')
    text = (ROOT / 'README.md').read_text()
    assert (
        f"{best['ratio']:.2f} of PyTorch's time, box AP {100 * best['AP']:.1f} instead of {100 * base['AP']:.1f}"
        in text
    )


def test_norms_to_choose_from_are_the_stored_results():
    rows = table((ROOT / 'docs/norms.md').read_text(), '| norm | BCCD')
    assert len(rows) == 6
    studies = [load(f'norms_{name}-norms-2000').rows for name in ('bccd', 'dsb2018')]
    for norm, *shown in rows:
        name = {'BatchNorm': 'TokenBN', 'PRepBN': 'PRepBN, linear'}.get(norm, norm)
        assert shown == [spread(by_seed(study, name).values()) for study in studies], norm


def test_differences_of_the_norms_page_are_those_of_the_stored_results():
    """Each number with an interval, and LayerNorm over both of its trainings."""
    page, known, trainings = (ROOT / 'docs/norms.md').read_text(), set(), []
    for dataset in ('bccd', 'dsb2018'):
        absorbed = load(f'absorb_{dataset}_2000').rows
        pairs = [(absorbed, 'all gone', 'teacher')]
        for study in (f'norms_{dataset}-norms', f'norms_{dataset}-norms-2000'):
            rows = load(study).rows
            controls = {row['name']: row.get('control') for row in rows}
            pairs += [(rows, name, control) for name, control in controls.items()]
        for rows, name, control in pairs:
            ap, base = by_seed(rows, name), by_seed(rows, control)
            differences = [ap[seed] - base[seed] for seed in ap if seed in base]
            known.add(f'{spread(differences, "{:+.1f}").partition(" ")[0]} {t_interval(differences)}')
        trained = by_seed(load(f'norms_{dataset}-norms-2000').rows, 'LayerNorm'), by_seed(absorbed, 'teacher')
        trainings.append(spread([ap for values in trained for ap in values.values()]))
    shown = re.findall(r'[+-]\d+\.\d \[[^\]]+\]', ' '.join(page.split()))
    assert len(shown) == 14 and not {*shown} - known
    assert f'{" and ".join(trainings)}.' in ' '.join(page.split())


def test_quick_start_of_the_readme_is_the_stored_one():
    text = (ROOT / 'README.md').read_text()
    assert quickstart_table(load('quickstart')) in text, 'python -m benchmarks.quickstart prints the table'


ABSORBED = {
    'BCCD, Faster R-CNN, box AP': 'bccd_2000',
    'DSB2018, Mask R-CNN, mask AP': 'dsb2018_2000',
    'DSB2018, 4,000 iterations': 'dsb2018_4000',
    'photographs, Faster R-CNN, box AP': 'animals_1000',
}


def test_table_of_absorbed_detectors_compares_seed_by_seed():
    ap = {'teacher': (0.5, 0.6, 0.7), 'fewest norms': (0.51, 0.58, 0.7), 'tuned': (0.4, 0.6)}
    stored = [
        dict(name=way, seed=seed, AP=value, kept=['norm'] * seed)
        for way, values in ap.items()
        for seed, value in enumerate(values)
    ]
    rows = table(absorption_table({'BCCD': stored}), '| | BCCD |')
    # Differences of +1, -2 and 0: mean -1/3, standard deviation 1.53, times 4.303 / sqrt(3).
    first = ['60.0: 50.0, 60.0, 70.0', '59.7: +1.0, -2.0, +0.0', '0 to 2', '-0.3 [-4.1, +3.5]']
    assert [row[1] for row in rows] == [*first, *['–'] * 6, '-10.0, +0.0, –']


@pytest.fixture(scope='module')
def absorbed() -> dict[str, list[dict]]:
    """The rows of each column of the tables of absorption."""
    return {column: load(f'absorb_{name}').rows for column, name in ABSORBED.items()}


def test_tables_of_absorption_are_the_stored_results(absorbed):
    full = absorption_table(absorbed)
    assert full in PAGE.read_text(), f'{PAGE} needs this table:\n{full}'
    assert size_table(load('absorb_size')) in PAGE.read_text()
    page = (ROOT / 'docs/absorb.md').read_text()
    teacher, none_kept, all_lost = table(page, '| | BCCD, Faster')
    assert all_lost == table(full, '| | BCCD, Faster')[5]
    reached = [row['agreement'] for rows in absorbed.values() for row in rows if row['name'] == 'fewest norms']
    photographs = [row['agreement'] for row in load('absorb_animals_1000').rows if row['name'] == 'fewest norms']
    said = f'reached in {sum(value >= 0.95 for value in reached)} of the {len(reached)} runs; '
    said += f'on photographs agreement was {min(photographs):.2f} to {max(photographs):.2f}'
    assert said in ' '.join(PAGE.read_text().split())
    for way, (label, *shown) in {'teacher': teacher, 'all gone': none_kept}.items():
        assert shown == [spread(by_seed(rows, way).values()) for rows in absorbed.values()], label


def points(rows: list[dict], name: str) -> list[str]:
    """AP of each seed of a row, from 0 to 100."""
    return [f'{100 * ap:.1f}' for ap in by_seed(rows, name).values()]


def test_pruned_ffns_are_the_stored_results():
    page = ' '.join(PAGE.read_text().split())
    bccd, dsb2018 = load('ffn_bccd-norms-600').rows, load('ffn_dsb2018-norms').rows
    rows = {cells[0]: cells[2:] for cells in table(PAGE.read_text(), '| `--ffn` |')}
    names = {
        '0, the teacher': 'teacher',
        '0.5': 'pruned 0.5',
        '0.75': 'pruned 0.75',
        '0.875': 'pruned 0.875',
        'control: 0.75, nothing fitted': 'cut 0.75, channels chosen beside A',
        'control: one matrix for each FFN': 'with A 1.0',
    }
    assert rows.keys() == names.keys()
    for title, cells in rows.items():
        seeds = {seed: ap for seed, ap in by_seed(bccd, names[title]).items() if seed in (1, 2)}
        shown = [', '.join(f'{100 * ap:.1f}' for ap in seeds.values()), *points(dsb2018, names[title])]
        assert cells == [*shown, '–'][:2], title
    # Chosen channels and random ones, beside the linear map.
    for name, text in (('with A 0.75', 'chosen ones'), ('with A, channels at random 0.75', 'random channels')):
        pairs = [row for row in bccd if row['name'] == name and row['seed'] in (0, 1)]
        ap = ' and '.join(f'{100 * row["AP"]:.1f}' for row in pairs)
        agreements = ' and '.join(f'{row["agreement"]:.3f}' for row in pairs)
        assert f'{text} {ap} (agreement {agreements})' in page, name
    differences = {}
    for kind in ('defocus_blur', 'gaussian_noise', 'jpeg_compression', 'contrast'):
        before, after = (by_seed(bccd, f'{name}, {kind}') for name in ('teacher', 'pruned 0.75'))
        differences[kind] = [100 * (after[seed] - before[seed]) for seed in before]
    dark = differences.pop('contrast')
    lowest, *others = sorted(sum(differences.values(), []))
    assert f'by {others[0]:+.1f} to {others[-1]:+.1f} in five of six cases' in page and len(others) == 5
    assert f'by {lowest:+.1f} in one with noise' in page
    teachers = ' and '.join(points(bccd, 'teacher, contrast'))
    assert f'where the teachers have {teachers} themselves, by {dark[0]:+.1f} and {dark[1]:+.1f}' in page


def test_times_of_pruned_ffns_are_the_stored_results():
    page, rows = ' '.join(PAGE.read_text().split()), load('ffn_latency').rows

    def span(share: float, *kinds: tuple[str, str]) -> str:
        found = [row['ratio'] for row in rows if row['share'] == share and (row['name'], row['form']) in kinds]
        return f'{min(found):.2f} to {max(found):.2f}'

    slow = ('pvt_s', 'deployed bfloat16')
    others = [kind for kind in {(row['name'], row['form']) for row in rows} if kind != slow]
    assert f'{span(0.75, *others)} with `--ffn 0.75`, {span(0.5, *others)} with `--ffn 0.5`' in page
    assert f'PVT-S deployed in bfloat16: {span(0.75, slow)} and {span(0.5, slow)}' in page


def test_converted_detectors_are_the_stored_results():
    names = {
        'PRepBN, 150 more': 'PRepBN, default start, 150 more',
        'PRepBN from statistics of LayerNorm, 150 more': 'PRepBN, calibrated start, 150 more',
        'TokenBN in its place, 150 more': 'TokenBN in its place, 150 more',
        'LayerNorm, 500 iterations': 'LayerNorm, 500 iterations',
    }
    stored = [load(f'finetune_{name}').rows for name in ('bccd', 'dsb2018')]
    for way, *cells in table(PAGE.read_text(), '| way | BCCD'):
        expected = []
        for rows in stored:
            ap, control = by_seed(rows, names.get(way, 'LayerNorm, 150 more')), by_seed(rows, 'LayerNorm, 150 more')
            difference = spread([ap[seed] - control[seed] for seed in ap], '{:+.1f}')
            expected += [spread(ap.values()), difference if way in names else '']
        assert cells == expected, way
    page = ' '.join((ROOT / 'docs/train.md').read_text().split())
    ways = 'PRepBN, default start, 150 more', 'LayerNorm, 150 more'
    pairs = [[by_seed(rows, way) for way in ways] for rows in stored]
    lost = [f'{100 * statistics.mean(control[seed] - ap[seed] for seed in ap):.1f}' for ap, control in pairs]
    assert 'after 150 iterations it was {} (BCCD) and {} (DSB2018) AP below LayerNorm'.format(*lost) in page


def test_ap_in_bfloat16_is_the_stored_result():
    rows = load('absorb_bccd').rows
    for name, key, text in (('teacher', 'teacher_AP', 'LayerNorm'), ('all gone', 'AP', 'every norm absorbed')):
        low, high = by_seed(rows, 'bfloat16', key), by_seed(rows, name)
        shown = ', '.join(f'{100 * (low[seed] - high[seed]) + 0.0:+.1f}' for seed in high)
        assert f'{text} {shown}' in ' '.join(PAGE.read_text().split()), shown
        assert f'{text} {shown}' in ' '.join((ROOT / 'docs/deploy.md').read_text().split()) or name != 'teacher'


def test_the_deployed_detectors_of_mmdet_are_the_stored_results():
    page = ' '.join((ROOT / 'docs/latency.md').read_text().split())
    rows = {(row['name'], row['form']): row for row in load('runtimes_mmdet_deployed').rows}
    swin, pvt, swin_low, pvt_low = (
        rows[f'{name}, mmdet', form] for form in ('deployed', 'deployed, bfloat16') for name in ('Swin-T', 'PVT-S')
    )
    ratios = [f'{row["to_mmdet"]:.2f}' for row in (swin, pvt, swin_low, pvt_low)]
    said = 'to {} (Swin-T) and {} (PVT-S) of its CPU time, in bfloat16 to {} and {}'.format(*ratios)
    times = [f'{value:,.0f}' for value in (min(pvt_low['times_ms']), max(pvt_low['times_ms']))]
    assert said in page and f'in five rounds PVT-S in bfloat16 took {times[0]} to {times[1]} ms' in page


def test_table_of_the_hard_teacher_is_the_stored_results():
    rows = load('absorb_hard_1600').rows
    full = students_table(rows)
    assert full in (ROOT / 'docs/absorb.md').read_text(), f'docs/absorb.md needs this table:\n{full}'
    assert grid_table(load('grid_hard').rows) in PAGE.read_text()


def by_column(text: str) -> dict[str, dict[str, str]]:
    """The cells of a table by the name of the row and the title of the column."""
    titles = [cell.strip() for cell in text.splitlines()[0].strip('|').split('|')]
    return {row[0]: dict(zip(titles[1:], row[1:], strict=True)) for row in table(text, '| |')}


def check_part(header: str, full: str) -> None:
    """Checks that every cell of a table of docs/latency.md stands in the full table."""
    page, full_cells = (ROOT / 'docs/latency.md').read_text(), by_column(full)
    for name, cells in by_column(page[page.index(header) :].split('\n\n')[0]).items():
        assert cells == {title: full_cells[name][title] for title in cells}, name


def test_tables_of_runtimes_are_the_stored_results():
    detectors, backbones = (
        runtimes_table(load('runtimes').select(size='800x1216', scope=scope)) for scope in ('detector', 'backbone')
    )
    for stored in (detectors, backbones, int8_table(load('int8').rows)):
        assert stored in PAGE.read_text(), stored
    check_part('| | eager | deployed', detectors)


def test_times_on_other_cpus_are_the_stored_results():
    epyc, avx2 = load('runtimes_epyc').rows, load('runtimes_avx2').rows
    for stored in (runtimes_table(epyc), runtimes_table(avx2), forms_table(load('cpu_forms').rows)):
        assert stored in PAGE.read_text(), stored
    page, fewer = ' '.join((ROOT / 'docs/latency.md').read_text().split()), channels_table(epyc)
    assert ' '.join(fewer.split()) in page, fewer
    ratios = [row['to_layer_norm'] for row in epyc if 'half' in row['name']]
    assert f'take {min(ratios):.2f} to {max(ratios):.2f} of the time**, in every form' in page
    times = {row['form']: row['to_mmdet'] for row in epyc if row['name'] == 'Swin-T, LayerNorm'}
    low, deployed = times['OpenVINO, bfloat16'], times['deployed, bfloat16']
    assert f'{low:.2f} with AVX-512 alone (deployed: {deployed:.2f})' in page
    assert ratios_table() in (ROOT / 'docs/latency.md').read_text(), ratios_table()


def test_first_table_of_the_readme_is_the_stored_results():
    readme, shown = (ROOT / 'README.md').read_text(), processors_table()
    assert shown in readme, f'python -m benchmarks.pages writes the table:\n{shown}'
    assert readme.index(shown) < readme.index('## '), 'before any heading'
    # Of the machines with rows of it: an oracle that reads the files by itself.
    eager, fast = (
        {row['name']: row for row in load('runtimes_epyc').select(form=form)} for form in ('eager', 'OpenVINO, int8')
    )
    assert (
        f'| {eager["Swin-T, mmdet"]["median_ms"]:,.0f} | {fast["Swin-T, mmdet"]["median_ms"]:,.0f} (OpenVINO, int8) |'
        in shown
    )
    assert f'| {fast["Swin-T, half of the multiply-adds"]["median_ms"]:.0f} (OpenVINO, int8) |' in shown


def test_tables_of_the_gpu_are_the_stored_results():
    tables = gpu_tables(load('gpu'))
    for stored in tables.values():
        assert stored in PAGE.read_text(), stored
    check_part('| | eager, float32', tables['detectors'])


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
    assert t_interval(difference[:2]) == '–', 'two seeds have no interval'


def test_only_the_rows_below_the_mark_are_replaced(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('a | b\n<!-- one -->\n| old |\n| rows |\n\nwords\n<!-- two -->\n| last |\n')
    replace_table(page, 'one', '| new |')
    replace_table(page, 'two', '| end |\n| end |')
    assert page.read_text() == 'a | b\n<!-- one -->\n| new |\n\nwords\n<!-- two -->\n| end |\n| end |\n'
    with pytest.raises(ValueError, match='has no line <!-- three -->'):
        replace_table(page, 'three', '| new |')
