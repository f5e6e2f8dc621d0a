"""The table of docs/absorb.md, from what benchmarks/absorb/run.py stored."""

from statistics import mean

# Cell of benchmarks/absorb/run.py: label in the table.
ROWS = {
    'teacher': 'LayerNorm, the teacher',
    'default': '**absorbed, the default**',
    'all gone': 'absorbed, none kept',
    'for int8': 'absorbed for int8 (`--int8`), none kept',
    'control': 'LayerNorm, 150 more iterations',
    'tuned on a folder': 'none kept, 150 iterations on pictures alone',
    'tuned without labels': 'none kept, 150 iterations on the training set without its labels',
    'tuned': 'none kept, 150 iterations on the training set',
}
SEEDS = ('0', '1', '2')


def absorption_table(datasets: dict[str, dict]) -> str:
    """Mean AP of every way, and what each seed has above or below its teacher.

    Args:
        datasets: Heading of a column, and the cells of ``absorb_DATASET.json``, by way and seed.
    """
    lines = [f'| | {" | ".join(datasets)} |', f'|---|{"---:|" * len(datasets)}']
    for way, label in ROWS.items():
        lines.append(f'| {label} | {" | ".join(_cell(cells, way) for cells in datasets.values())} |')
        if way == 'default':
            kept = [sorted(len(seed['kept']) for seed in cells[way].values()) for cells in datasets.values()]
            ranges = [' to '.join(map(str, dict.fromkeys((counts[0], counts[-1])))) for counts in kept]
            lines.append(f'| LayerNorms that it keeps, of 24 | {" | ".join(ranges)} |')
    return '\n'.join(lines)


def _cell(cells: dict, way: str) -> str:
    ap = {seed: values['AP'] for seed, values in cells.get(way, {}).items()}
    teachers = {seed: values['AP'] for seed, values in cells['teacher'].items()}
    if not ap:
        return '–'
    if way == 'teacher':
        shown = [f'{ap[seed]:.3f}' for seed in SEEDS]
    else:
        shown = [f'{ap[seed] - teachers[seed]:+.3f}' if seed in ap else '–' for seed in SEEDS]
    # Of some seeds a mean would stand beside means of other teachers.
    average = f'{mean(ap.values()):.3f}: ' if len(ap) == len(SEEDS) else ''
    return average + ', '.join(shown)
