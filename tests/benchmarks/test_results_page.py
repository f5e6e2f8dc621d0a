"""Pages show the numbers of benchmarks/results: every table and sentence is made again and looked for."""

import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.absorb import loss
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
from slab_det.compare.agreement import LOSS, LOSS_EVIDENCE

README, PAGE = ROOT / 'README.md', ROOT / 'benchmarks' / 'README.md'
ABSORB, DEPLOY, LATENCY, NORMS = (ROOT / 'docs' / f'{name}.md' for name in ('absorb', 'deploy', 'latency', 'norms'))
# A page and the text that it must show.
Shown = Iterator[tuple[Path, str]]
BOTH = ('bccd', 'dsb2018')


def load(name: str) -> Results:
    return Results(FOLDER / f'{name}.json')


def words(text: str) -> str:
    return ' '.join(text.split())


def line(*cells: str) -> str:
    return f'| {" | ".join(cells)} |'


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table that begins with a header."""
    lines = page[page.index(header) :].split('\n\n')[0].split('\n<!--')[0].splitlines()
    return [[cell.strip(' *') for cell in line.strip('|').split('|')] for line in lines]


def points(rows: list[dict], name: str, seeds: tuple[int, ...] = (0, 1, 2), key: str = 'AP') -> str:
    """AP of each of the seeds of a row, from 0 to 100."""
    return ', '.join(f'{100 * ap:.1f}' for seed, ap in by_seed(rows, name, key).items() if seed in seeds)


def changes(rows: list[dict], name: str, other: str, seeds: tuple[int, ...] = (0, 1, 2)) -> list[float]:
    """How much higher the AP of a row is than that of another row, for each of the seeds, from 0 to 100."""
    ap, base = by_seed(rows, name), by_seed(rows, other)
    return [100 * (ap[seed] - base[seed]) for seed in ap if seed in seeds]


def part(full: str, page: Path, header: str) -> str:
    """The rows and columns that a page shows of a table."""
    (_, *titles), *rows = table(full, '| |')
    cells = {name: dict(zip(titles, values, strict=True)) for name, *values in rows}
    (_, *shown), _, *names = table(page.read_text(), header)
    return '\n'.join(line(name, *(cells[name][title] for title in shown)) for name, *_ in names)


def loss_of_an_agreement() -> Shown:
    found = loss.find_students()
    assert loss.fit([*found.values()]) == pytest.approx(LOSS, abs=0.05)
    yield PAGE, loss.table(found)
    yield PAGE, loss.heads_table(loss.find_students(with_heads=True))
    total = loss.table(found).splitlines()[-1]
    count, share = re.search(r'\| (\d+) \|.* (\d+)% lost at most 1.0 more', total).groups()
    assert LOSS_EVIDENCE == f'Of {count} students, {share} % lost at most 1 AP more than expected.'
    yield ABSORB, f'{share} % of {count} students lost'


def channels() -> Shown:
    teacher, *rows = load('absorb_bccd_600').rows
    lines = [line('all, the teacher', '', f'{100 * teacher["AP"]:.1f}')]
    for row in rows:
        if 'share' in row:
            lines.append(line(f'{row["share"]:.2f}', f'{row["agreement"]:.3f}', f'{100 * row["AP"]:.1f}'))
    yield PAGE, '\n'.join(lines)
    yield ABSORB, '\n'.join(lines)


def first_page() -> Shown:
    yield README, processors_table()
    yield README, quickstart_table(load('quickstart'))
    rows = {row['name']: row for row in load('optimize_bccd').rows}
    (best,) = (row for row in rows.values() if row['recommended'])
    text = "{:.2f} of PyTorch's time, box AP {:.1f} instead of {:.1f}"
    yield README, text.format(best['ratio'], 100 * best['AP'], 100 * rows['eager']['AP'])


def norms() -> Shown:
    studies = [load(f'norms_{name}-norms-2000').rows for name in BOTH]
    labels = ('LayerNorm', 'LayerNorm, one more in each FFN', 'BatchNorm', '**BN+FFNBN**', 'PRepBN')
    for label in (*labels, 'PRepBN, one more in each FFN'):
        name = {'BatchNorm': 'TokenBN', 'PRepBN': 'PRepBN, linear'}.get(label, label.strip('*'))
        yield NORMS, line(label, *(spread(by_seed(study, name).values()) for study in studies))


def absorbed_norms() -> Shown:
    names = {
        'BCCD, Faster R-CNN, box AP': 'bccd_2000',
        'DSB2018, Mask R-CNN, mask AP': 'dsb2018_2000',
        'DSB2018, 4,000 iterations': 'dsb2018_4000',
        'photographs, Faster R-CNN, box AP': 'animals_1000',
    }
    absorbed = {column: load(f'absorb_{name}').rows for column, name in names.items()}
    full = absorption_table(absorbed)
    yield PAGE, full
    yield PAGE, size_table(load('absorb_size'))
    _, _, teacher, default, kept, lost, none_kept, all_lost, *_ = full.splitlines()
    for way, full_line in {'teacher': teacher, 'fewest norms': default, 'all gone': none_kept}.items():
        cells = [spread(by_seed(rows, way).values()) for rows in absorbed.values()]
        yield ABSORB, line(full_line.split(' | ')[0].lstrip('| '), *cells)
    yield ABSORB, '\n'.join([kept, lost])
    yield ABSORB, all_lost
    found = {
        column: [row['agreement'] for row in rows if row['name'] == 'fewest norms'] for column, rows in absorbed.items()
    }
    every, photographs = sum(found.values(), []), [*found.values()][-1]
    yield ABSORB, f'reached in {sum(x >= 0.95 for x in every)} of the {len(every)} runs of the table;'
    yield ABSORB, f'on photographs agreement was {min(photographs):.2f} to {max(photographs):.2f}'


def pruned_ffns() -> Shown:
    bccd, dsb2018 = load('ffn_bccd-norms-600').rows, load('ffn_dsb2018-norms').rows
    for title, left, name in (
        ('0, the teacher', 'all', 'teacher'),
        ('0.5', '1/2', 'pruned 0.5'),
        ('**0.75**', '1/4', 'pruned 0.75'),
        ('0.875', '1/8', 'pruned 0.875'),
        ('control: 0.75, nothing fitted', '1/4', 'cut 0.75, channels chosen beside A'),
        ('control: one matrix for each FFN', 'none', 'with A 1.0'),
    ):
        yield PAGE, line(title, left, points(bccd, name, (1, 2)), points(dsb2018, name) or '–')
    first, second = changes(bccd, 'pruned 0.75', 'teacher', (1, 2))
    (third,) = changes(dsb2018, 'pruned 0.75', 'teacher')
    cost = [-value for name in ('pruned 0.875', 'with A 1.0') for value in changes(bccd, name, 'teacher', (1, 2))]
    yield ABSORB, f'0.75 changes AP by {first:+.1f} and {second:+.1f} (BCCD, two seeds) and {third:+.1f} (DSB2018, one)'
    yield ABSORB, '0.875 costs {:.1f} and {:.1f} on BCCD, one matrix in place of each FFN {:.1f}:'.format(*cost)
    # Chosen channels and random ones, beside the linear map.
    for name, text in (('with A 0.75', 'chosen ones'), ('with A, channels at random 0.75', 'random channels')):
        pairs = [row for row in bccd if row['name'] == name and row['seed'] in (0, 1)]
        ap = ' and '.join(f'{100 * row["AP"]:.1f}' for row in pairs)
        agreements = ' and '.join(f'{row["agreement"]:.3f}' for row in pairs)
        yield PAGE, f'{text} {ap} (agreement {agreements})'
    kinds = ('defocus_blur', 'gaussian_noise', 'jpeg_compression', 'contrast')
    *found, dark = (changes(bccd, f'pruned 0.75, {kind}', f'teacher, {kind}') for kind in kinds)
    lowest, *others = sorted(sum(found, []))
    assert len(others) == 5
    yield PAGE, f'by {others[0]:+.1f} to {others[-1]:+.1f} in five of six cases'
    yield PAGE, f'by {lowest:+.1f} in one with noise'
    teachers = points(bccd, 'teacher, contrast').replace(',', ' and')
    yield PAGE, f'where the teachers have {teachers} themselves, by {dark[0]:+.1f} and {dark[1]:+.1f}'


def times_of_pruned_ffns() -> Shown:
    slow, others = {}, {}
    for row in load('ffn_latency').rows:
        kind = slow if (row['name'], row['form']) == ('pvt_s', 'deployed bfloat16') else others
        kind.setdefault(row['share'], []).append(row['ratio'])
    spans = [f'{min(ratios):.2f} to {max(ratios):.2f}' for kind in (others, slow) for ratios in (kind[0.75], kind[0.5])]
    yield ABSORB, '{} with `--ffn 0.75`, {} with `--ffn 0.5`'.format(*spans[:2])
    yield ABSORB, 'PVT-S deployed in bfloat16: {} and {}'.format(*spans[2:])


def converted_detectors() -> Shown:
    stored, control = [load(f'finetune_{name}').rows for name in BOTH], 'LayerNorm, 150 more'
    for title, name in {
        'LayerNorm, 500 iterations': 'LayerNorm, 500 iterations',
        'LayerNorm, 150 more: the control': control,
        'PRepBN, 150 more': 'PRepBN, default start, 150 more',
        'PRepBN from statistics of LayerNorm, 150 more': 'PRepBN, calibrated start, 150 more',
        'TokenBN in its place, 150 more': 'TokenBN in its place, 150 more',
    }.items():
        cells = []
        for rows in stored:
            minus = '' if name == control else spread([x / 100 for x in changes(rows, name, control)], '{:+.1f}')
            cells += [spread(by_seed(rows, name).values()), minus]
        yield PAGE, line(title, *cells)
    for way, said in (
        ('default', 'after 150 iterations {:.1f} (BCCD) and {:.1f} (DSB2018) below LayerNorm'),
        ('calibrated', 'Another start, which is not offered, lost {:.1f} and {:.1f}'),
    ):
        name = f'PRepBN, {way} start, 150 more'
        yield ABSORB, said.format(*(-statistics.mean(changes(rows, name, control)) for rows in stored))


def precision() -> Shown:
    rows = load('absorb_bccd').rows
    for name, key, text in (('teacher', 'teacher_AP', 'LayerNorm'), ('all gone', 'AP', 'every norm absorbed')):
        low, high = by_seed(rows, 'bfloat16', key), by_seed(rows, name)
        said = ', '.join(f'{100 * (low[seed] - high[seed]) + 0.0:+.1f}' for seed in high)
        for page in (PAGE, DEPLOY)[: 1 + (name == 'teacher')]:
            yield page, f'{text} {said}'


def deployed_detectors_of_mmdet() -> Shown:
    rows = {(row['name'], row['form']): row for row in load('runtimes_mmdet_deployed').rows}
    swin, pvt, swin_low, pvt_low = (
        rows[f'{name}, mmdet', form] for form in ('deployed', 'deployed, bfloat16') for name in ('Swin-T', 'PVT-S')
    )
    ratios = [f'{row["to_mmdet"]:.2f}' for row in (swin, pvt, swin_low, pvt_low)]
    yield LATENCY, 'to {} (Swin-T) and {} (PVT-S) of its CPU time, in bfloat16 to {} and {}'.format(*ratios)
    times = [f'{value:,.0f}' for value in (min(pvt_low['times_ms']), max(pvt_low['times_ms']))]
    yield LATENCY, 'in five rounds PVT-S in bfloat16 took {} to {} ms'.format(*times)


def hard_teacher() -> Shown:
    yield ABSORB, students_table(load('absorb_hard_1600').rows)
    yield PAGE, grid_table(load('grid_hard').rows)


def runtimes() -> Shown:
    detectors, backbones = (
        runtimes_table(load('runtimes').select(size='800x1216', scope=scope)) for scope in ('detector', 'backbone')
    )
    epyc = load('runtimes_epyc').rows
    yield PAGE, detectors
    yield LATENCY, part(detectors, LATENCY, '| | eager | deployed')
    yield PAGE, backbones
    yield PAGE, int8_table(load('int8').rows)
    yield PAGE, runtimes_table(epyc)
    yield PAGE, runtimes_table(load('runtimes_avx2').rows)
    yield PAGE, forms_table(load('cpu_forms').rows)
    yield LATENCY, channels_table(epyc)
    yield LATENCY, ratios_table()
    half = [row['to_layer_norm'] for row in epyc if 'half' in row['name']]
    yield LATENCY, f'take {min(half):.2f} to {max(half):.2f} of the time**, in every form'
    times = {row['form']: row['to_mmdet'] for row in epyc if row['name'] == 'Swin-T, LayerNorm'}
    low, deployed = times['OpenVINO, bfloat16'], times['deployed, bfloat16']
    yield LATENCY, f'{low:.2f} with AVX-512 alone (deployed: {deployed:.2f})'


def gpu() -> Shown:
    tables = gpu_tables(load('gpu'))
    for stored in tables.values():
        yield PAGE, stored
    yield LATENCY, part(tables['detectors'], LATENCY, '| | eager, float32')


SUBJECTS = (loss_of_an_agreement, channels, first_page, norms, absorbed_norms, pruned_ffns, times_of_pruned_ffns)
SUBJECTS += (converted_detectors, precision, deployed_detectors_of_mmdet, hard_teacher, runtimes, gpu)


@pytest.mark.parametrize('subject', SUBJECTS, ids=lambda subject: subject.__name__)
def test_pages_show_the_stored_results(subject: Callable[[], Shown]) -> None:
    missing = [f'{page}:\n{text}' for page, text in subject() if words(text) not in words(page.read_text())]
    assert not missing, '\n\n'.join(missing)


@pytest.mark.parametrize('study', sorted(re.findall(r'^<!-- norms (\S+) -->$', PAGE.read_text(), re.MULTILINE)))
def test_a_study_is_published_as_it_is_stored(study: str, tmp_path: Path) -> None:
    shutil.copy(PAGE, tmp_path)
    publish(study, tmp_path / PAGE.name, FOLDER)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text(), f'write the table of {study} again'


def test_every_stored_result_has_its_script_or_is_named_on_a_page() -> None:
    texts = [*(ROOT / 'benchmarks').rglob('*.py'), *(ROOT / 'docs').glob('*.md'), README, PAGE]
    text = ''.join(path.read_text() for path in texts)
    for file in FOLDER.glob('*.json'):
        study = file.stem.removeprefix('norms_')
        # A study of norms has a table of this mark, or its name in a sentence.
        names = (f'<!-- norms {study} -->', f'`{study}`') if study != file.stem else (file.name,)
        assert any(name in text for name in names), file.name


def test_every_difference_of_the_norms_page_is_one_of_the_stored_results() -> None:
    """Each number with an interval, and LayerNorm over both of its trainings."""
    page, known, trainings = words(NORMS.read_text()), set(), []
    for dataset in BOTH:
        absorbed = load(f'absorb_{dataset}_2000').rows
        pairs = [(absorbed, 'fewest norms', 'teacher')]
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
    shown = re.findall(r'[+-]\d+\.\d \[[^\]]+\]', page)
    assert len(shown) == 14 and not {*shown} - known
    assert f'{" and ".join(trainings)}.' in page


def test_table_compares_seed_by_seed() -> None:
    control, other = [0.512, 0.498, 0.530], [0.505, 0.499, 0.502]
    rows = [dict(name='LN', seed=seed, AP=ap) for seed, ap in zip((0, 1, 10), control, strict=True)]
    rows += [dict(name='BN', control='LN', seed=seed, AP=other[index]) for seed, index in ((10, 2), (0, 0), (1, 1))]
    _, _, first, second = table(study_table(rows, 'box AP'), '| run |')
    assert first == ['LN', '51.2, 49.8, 53.0', '51.3 ± 1.6', '–', '–']
    difference = [100 * (b - a) for a, b in zip(control, other, strict=True)]
    mean, std = statistics.mean(difference), statistics.stdev(difference)
    # 4.303 is the 97.5 % quantile of Student's t with two degrees of freedom.
    half = 4.303 * std / math.sqrt(3)
    shown = ['BN', '50.5, 49.9, 50.2', '50.2 ± 0.3', f'{mean:+.1f} ± {std:.1f}']
    assert second == [*shown, f'[{mean - half:+.1f}, {mean + half:+.1f}]']
    assert t_interval(difference[:2]) == '–', 'two seeds have no interval'


def test_only_the_rows_below_the_mark_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / 'page.md'
    page.write_text('a | b\n<!-- one -->\n| old |\n| rows |\n\nwords\n<!-- two -->\n| last |\n')
    replace_table(page, 'one', '| new |')
    replace_table(page, 'two', '| end |\n| end |')
    assert page.read_text() == 'a | b\n<!-- one -->\n| new |\n\nwords\n<!-- two -->\n| end |\n| end |\n'
    with pytest.raises(ValueError, match='has no line <!-- three -->'):
        replace_table(page, 'three', '| new |')
