"""Sentences that benchmarks/pages.py does not write show the numbers of benchmarks/results, and its tables compare."""

import math
import statistics

import pytest

from benchmarks.absorb.table import absorption_table
from benchmarks.norms.table import by_seed, replace_table, study_table, t_interval
from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.runtimes import processors_table

PAGE = ROOT / 'benchmarks' / 'README.md'


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


def test_agreements_of_norms_are_the_stored_results(absorbed):
    reached = [row['agreement'] for rows in absorbed.values() for row in rows if row['name'] == 'fewest norms']
    photographs = [row['agreement'] for row in load('absorb_animals_1000').rows if row['name'] == 'fewest norms']
    said = f'reached in {sum(value >= 0.95 for value in reached)} of the {len(reached)} runs; '
    said += f'on photographs agreement was {min(photographs):.2f} to {max(photographs):.2f}'
    assert said in ' '.join(PAGE.read_text().split())


def points(rows: list[dict], name: str) -> list[str]:
    """AP of each seed of a row, from 0 to 100."""
    return [f'{100 * ap:.1f}' for ap in by_seed(rows, name).values()]


def test_pruned_ffns_are_the_stored_results():
    page = ' '.join(PAGE.read_text().split())
    bccd = load('ffn_bccd-norms-600').rows
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
    stored = [load(f'finetune_{name}').rows for name in ('bccd', 'dsb2018')]
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
