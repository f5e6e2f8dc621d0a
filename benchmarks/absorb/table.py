"""The tables of absorbed detectors, from what benchmarks/absorb/run.py stored."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

from benchmarks.norms.table import by_seed, spread, t_interval
from slab_det.common.record import format_table

# Way of benchmarks/absorb/run.py: label in the table.
LABELS = {
    'teacher': 'LayerNorm, the teacher',
    'fewest norms': "absorbed, fewest norms kept (`keep='auto'`)",
    'all gone': 'absorbed, none kept',
    'for int8': 'absorbed for int8 (`--int8`), none kept',
    'control': 'LayerNorm, 150 more iterations',
    'tuned on a folder': 'none kept, 150 iterations on pictures alone',
    'tuned without labels': 'none kept, 150 iterations on the training set without its labels',
    'tuned': 'none kept, 150 iterations on the training set',
}
SEEDS = (0, 1, 2)
MINUS = 'minus its teacher, 95 % t-interval'


def absorption_table(datasets: dict[str, list[dict]]) -> str:
    """Mean AP of every way, from 0 to 100, and the difference of each seed to its teacher.

    Args:
        datasets: Rows of an ``absorb_DATASET.json``, by the title of their column.
    """
    cells = []
    for way, label in LABELS.items():
        cells.append([label, *(_ap_cell(rows, way) for rows in datasets.values())])
        if way == 'fewest norms':
            counts = [sorted(len(row['kept']) for row in rows if row['name'] == way) for rows in datasets.values()]
            ranges = [' to '.join(map(str, dict.fromkeys((found[0], found[-1])))) for found in counts]
            cells.append(['LayerNorms kept, of 24', *ranges])
        if way in ('fewest norms', 'all gone'):
            cells.append([MINUS, *(_difference(rows, way) for rows in datasets.values())])
    return format_table(['', *datasets], cells)


def _ap_cell(rows: list[dict], way: str) -> str:
    ap, teachers = ({row['seed']: row['AP'] for row in rows if row['name'] == name} for name in (way, 'teacher'))
    if not ap:
        return '–'
    if way == 'teacher':
        shown = [f'{100 * ap[seed]:.1f}' for seed in SEEDS]
    else:
        shown = [f'{100 * (ap[seed] - teachers[seed]):+.1f}' if seed in ap else '–' for seed in SEEDS]
    # A mean over fewer seeds would stand beside means of other teachers.
    average = f'{100 * mean(ap.values()):.1f}: ' if len(ap) == len(SEEDS) else ''
    return average + ', '.join(shown)


def _difference(rows: list[dict], way: str) -> str:
    ap, teachers = by_seed(rows, way), by_seed(rows, 'teacher')
    differences = [value - teachers[seed] for seed, value in ap.items()]
    if not differences:
        return '–'
    return f'{spread(differences, "{:+.1f}").partition(" ")[0]} {t_interval(differences)}'


APS = ('mask AP', 'box AP')
# Way of benchmarks/absorb/run.py: label in the table of students.
STUDENTS = {
    'teacher': 'LayerNorm, the teacher',
    'channels 0.7': '`--channels 0.7`',
    'channels 0.5': '`--channels 0.5`',
    'channels 0.5, tuned without labels': '`--channels 0.5`, then 150 iterations without labels',
    'channels 0.33': '`--channels 0.33`',
    'channels 0.33, tuned without labels': '`--channels 0.33`, then 150 iterations without labels',
    'channels auto': '`--channels auto`',
    'thin blocks': 'only attention and FFNs, share of theirs',
    'all gone': 'norms: `--channels 1 --norms remove`',
    'affine FFNs': 'control: each FFN its best affine map',
    'norms as scales': 'control: each norm a scale per channel',
}


def students_table(rows: list[dict]) -> str:
    """AP of every student, from 0 to 100, seed by seed, and the mean difference of mask AP with its interval.

    Args:
        rows: Rows of one ``absorb_DATASET.json``.
    """
    titles = {'share': 'multiply-adds left', 'agreement': 'agreement', 'AP': 'mask AP', 'box_AP': 'box AP'}
    formats = {'share': '{:.2f}', 'agreement': '{:.3f}', 'AP': '{:.1f}', 'box_AP': '{:.1f}'}
    cells = []
    for way, label in STUDENTS.items():
        found = sorted((row for row in rows if row['name'] == way), key=lambda row: row['seed'])
        values = [
            [formats[key].format(row[key] * (100 if 'AP' in key else 1)) for row in found if row.get(key) is not None]
            for key in titles
        ]
        if found:
            minus = _difference(rows, way) if len(found) == len(SEEDS) and way != 'teacher' else '–'
            cells.append([label, *(', '.join(column) or '–' for column in values), minus])
    return format_table(['', *titles.values(), f'mask AP {MINUS}'], cells)


def tuned_table(teachers: Mapping[str, Sequence[dict]]) -> str:
    """AP of students, seed by seed, in closed form, after a fine-tune without labels, and by what needs labels.

    Args:
        teachers: The rows of each kind of teacher and of its students, by its title.
    """
    titles = [text.format(ap) for text in ('{}', 'after the fine-tune: {}') for ap in APS]
    titles += ['with labels: mask AP', 'from scratch: mask AP']
    lines = [line for title, rows in teachers.items() for line in _tuned_lines(title, rows)]
    return format_table(['', 'multiply-adds left', *titles], lines)


def _tuned_lines(title: str, rows: Sequence[dict]) -> Iterator[list[str]]:
    found: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row['seed']):
        found.setdefault(row['name'], []).append(row)

    def cells(name: str, keys: Sequence[str] = ('AP', 'box_AP')) -> list[str]:
        columns = [[f'{100 * row[key]:.1f}' for row in found.get(name, ())] for key in keys]
        return [', '.join(column) or '–' for column in columns]

    def line(label: str, shares: str, closed: str, tuned: str, with_labels: str, scratch: str) -> list[str]:
        return [label, shares, *cells(closed), *cells(tuned), *cells(with_labels, ['AP']), *cells(scratch, ['AP'])]

    yield line(title, '', 'teacher', '', '', '')
    for name, students in found.items():
        if 'share' in students[0]:
            shares = ', '.join(f'{row["share"]:.2f}' for row in students)
            ways = (f'{name}, {way}' for way in ('tuned without labels', 'tuned', 'from scratch'))
            yield line(f'`--{name}`', shares, name, *ways)
    if 'all gone' in found:
        yield line('`--channels 1 --norms remove`', '', 'all gone', 'tuned without labels', 'tuned', '')
