"""Writes every table and every number that pages show of benchmarks/results, and draws their pictures.

    python -m benchmarks.pages

A table, or a paragraph that is generated as a whole, stands below a line ``<!-- NAME -->`` of its page. Of a sentence
only the numbers are generated: its words are searched in the page, whatever the lines, and its numbers written.
"""

import slab_det  # noqa: F401 (before mmdet: registers everything)

# isort: split

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import numpy as np

from benchmarks import cpu_forms, gpu, int8, optimize, quickstart, runtimes
from benchmarks.absorb import ruler, size
from benchmarks.absorb.run import CORRUPTIONS, SEVERITIES
from benchmarks.absorb.table import absorption_table, students_table, tuned_table
from benchmarks.norms.table import by_seed, replace_table, spread, study_table, t_interval
from benchmarks.results import FOLDER, ROOT, Results
from slab_det.common.record import NOT_RECORDED, format_table

README, BENCHMARKS = Path('README.md'), Path('benchmarks/README.md')
LATENCY, ABSORB, NORMS, DEPLOY, TRAIN = (
    Path('docs', f'{name}.md') for name in ('latency', 'absorb', 'norms', 'deploy', 'train')
)
STUDIES = (
    *(f'bccd-{name}' for name in ('norms-2000', 'norms', 'starts', 'pipeline')),
    *(f'dsb2018-{name}' for name in ('norms-2000', 'norms', 'starts', 'recalibration')),
)
# Columns of the tables of absorbed detectors: their files.
ABSORBED = {
    'BCCD, Faster R-CNN, box AP': 'absorb_bccd_2000',
    'DSB2018, Mask R-CNN, mask AP': 'absorb_dsb2018_2000',
    'DSB2018, 4,000 iterations': 'absorb_dsb2018_4000',
    'photographs, Faster R-CNN, box AP': 'absorb_animals_1000',
}
# Teachers of the hard set, and the files of their students.
HARD = {'teachers at 224 pixels': 'absorb_hard_700', 'teacher at 320 pixels': 'absorb_hard_320_900'}
# What docs/latency.md shows of the full tables.
SHOWN = (
    *('Swin-T, mmdet', 'Swin-T, LayerNorm', 'Swin-T, absorbed, none kept', 'Swin-T-PRepBN', 'SLAB-Swin-T'),
    *('PVT-S, mmdet', 'PVT-S, LayerNorm', 'PVT-S-PRepBN'),
)
HIDDEN_FORMS = ('torch.compile', 'ONNX Runtime', 'eager, float16')
# Detectors of runtimes.json without norms that are otherwise as their LayerNorm detector.
WITHOUT_NORMS = ('Swin-T, absorbed, none kept', 'Swin-T-PRepBN', 'Swin-T-BN+FFNBN', 'PVT-S-PRepBN')
# A number of a sentence.
NUMBER = r'[+-]?\d+(?:[.,]\d+)*'


class Block(NamedTuple):
    """A table of a page.

    Attributes:
        files: Names of the result files that it shows.
        make: Returns its text.
    """

    files: Sequence[str]
    make: Callable[[], str]


class Sentence(NamedTuple):
    """A part of a sentence of a page.

    Attributes:
        text: Its words, with {} in place of each number.
        numbers: The numbers.
    """

    text: str
    numbers: Sequence[str]


def load(name: str) -> Results:
    return Results(FOLDER / f'{name}.json')


def select(name: str, **values: object) -> dict[tuple[str, str], dict]:
    """The rows of a file that have these values, by name and form."""
    return {(row['name'], row['form']): row for row in load(name).select(**values)}


# Tables.


def training_table() -> str:
    """Time and memory of a training step over LayerNorm's, on a CPU."""
    rows = {(row['model'], row['name']): row for row in load('training_cost_cpu').rows}
    models, norms = (dict.fromkeys(key[i] for key in rows) for i in (0, 1))
    keys = ('time_ratio', 'memory_ratio')
    lines = [[norm, *(f'{rows[model, norm][key]:.3f}' for model in models for key in keys)] for norm in norms]
    return format_table(('norm', *(title for model in models for title in (f'{model}, time', 'memory'))), lines)


def training_summary() -> str:
    """Time of a training step over LayerNorm's, on a CPU and on a GPU."""
    norms = {'PRepBN, gamma falls': 'PRepBN, gamma 0.5', 'PRepBN, gamma 0': 'PRepBN, gamma 0', 'UN': 'UN'}
    rows = {
        **{f'backbone {model}, CPU': load('training_cost_cpu').select(model=model) for model in ('Swin-T', 'PVT-T')},
        'Mask R-CNN, Swin-T, H100': load('gpu').select(part='training'),
    }
    times = {title: {row['name']: row['time_ratio'] for row in found} for title, found in rows.items()}
    lines = [[title, *(f'{found[norm]:.2f}' for norm in norms.values())] for title, found in times.items()]
    return format_table(('', *norms), lines)


def norms_table() -> str:
    """Mean AP of each norm of the long runs."""
    names = {
        'LayerNorm': 'LayerNorm',
        'LayerNorm, one more in each FFN': 'LayerNorm, one more in each FFN',
        'BatchNorm': 'TokenBN',
        '**BN+FFNBN**': 'BN+FFNBN',
        'PRepBN': 'PRepBN, linear',
        'PRepBN, one more in each FFN': 'PRepBN, one more in each FFN',
    }
    studies = [load(f'norms_{name}-norms-2000').rows for name in ('bccd', 'dsb2018')]
    lines = [[title, *(spread(by_seed(rows, name).values()) for rows in studies)] for title, name in names.items()]
    return format_table(('norm', 'BCCD, box AP', 'DSB2018, mask AP'), lines)


def rows_of(files: Mapping[str, str]) -> dict[str, list[dict]]:
    """The rows of some files, under the titles that the files have."""
    return {title: load(name).rows for title, name in files.items()}


def absorbed_summary() -> str:
    """Mean AP of teachers and of detectors without norms, and their difference as in the full table."""
    datasets, ways = rows_of(ABSORBED), ('teacher', 'all gone')
    lines = absorption_table(datasets).splitlines()
    means = [' | '.join(spread(by_seed(rows, way).values()) for rows in datasets.values()) for way in ways]
    # Of the full table: titles, rule, teacher, fewest norms, norms kept, difference, all gone, difference.
    for line, cells in zip((2, 6), means, strict=True):
        lines[line] = f'| {lines[line].split("|")[1].strip()} | {cells} |'
    return '\n'.join([*lines[:3], *lines[6:8]])


def channels_ap_table() -> str:
    """AP of Faster R-CNNs on BCCD with fewer channels, a value for each seed."""
    rows = load('absorb_bccd_600').rows
    lines = []
    for name in dict.fromkeys(row['name'] for row in rows if row['name'] == 'teacher' or 'share' in row):
        found = sorted((row for row in rows if row['name'] == name), key=lambda row: row['seed'])
        shares, kept = ([row.get(key) for row in found] for key in ('share', 'retained'))
        lines.append(
            (
                'all, the teacher' if name == 'teacher' else name.replace('channels', '`--channels') + '`',
                ', '.join(f'{share:.2f}' for share in shares if share is not None),
                ', '.join(f'{share:.3f}' for share in kept if share is not None),
                ', '.join(f'{100 * row["AP"]:.1f}' for row in found),
            )
        )
    return format_table(('', 'multiply-adds left', 'ruler', 'box AP'), lines)


def corruptions_table() -> str:
    """AP on corrupted images of BCCD at severities 1, 3 and 5: the mean of the seeds."""
    rows = load('absorb_bccd_600').rows
    seeds = {row['seed'] for row in rows if row['name'].startswith('teacher, ')}
    rows = [row for row in rows if row['seed'] in seeds]

    def mean_ap(name: str) -> str:
        return f'{100 * statistics.mean(row["AP"] for row in rows if row["name"] == name):.1f}'

    ways = {'teacher': 'all, the teacher', 'channels 0.5': '`--channels 0.5`', 'channels 0.33': '`--channels 0.33`'}
    lines = [
        [label, mean_ap(way)]
        + [', '.join(mean_ap(f'{way}, {name} {severity}') for severity in SEVERITIES) for name in CORRUPTIONS]
        for way, label in ways.items()
    ]
    return format_table(['', 'none', *(name.replace('_', ' ') for name in CORRUPTIONS)], lines)


def ablation_table() -> str:
    """AP and agreement of detectors absorbed with other steps."""
    names = {
        'all steps, 100 images': 'all steps',
        'FPN not fitted': 'without the neck',
        'layers that write to the residual stream not fitted': 'without the writers',
        'neither': 'without both',
        'neither, one scale per channel instead of M': 'one scale per channel, without both',
        'r from 1e-6 on, the best one': 'the best ridge from 1e-6 on',
        **{name: name for name in ('every tenth token', '25 images', '400 images')},
    }
    files = [{row['name']: row for row in load(f'absorb_ablation_{name}').rows} for name in ('bccd', 'dsb2018')]
    lines = []
    for title, name in names.items():
        found = [rows[name] for rows in files]
        cells = [(f'{100 * row["AP"]:.1f}', f'{row["agreement"]:.3f}') for row in found]
        lines.append([title, *sum(cells, ())])
    titles = ('every norm gone, seed 0', 'BCCD: AP', 'agreement', 'DSB2018: AP', 'agreement')
    return format_table(titles, lines)


def ffn_table() -> str:
    """AP of detectors with fewer channels in each FFN."""
    ways = {
        '0, the teacher': ('all', 'teacher'),
        '0.5': ('1/2', 'pruned 0.5'),
        '**0.75**': ('1/4', 'pruned 0.75'),
        '0.875': ('1/8', 'pruned 0.875'),
        'control: 0.75, nothing fitted': ('1/4', 'cut 0.75, channels chosen beside A'),
        'control: one matrix for each FFN': ('none', 'with A 1.0'),
    }
    bccd, dsb2018 = load('ffn_bccd-norms-600').rows, load('ffn_dsb2018-norms').rows
    lines = []
    for title, (left, name) in ways.items():
        points = [
            [f'{100 * ap:.1f}' for seed, ap in by_seed(rows, name).items() if seed in seeds]
            for rows, seeds in ((bccd, (1, 2)), (dsb2018, (0,)))
        ]
        lines.append((title, left, *(', '.join(cell) or '–' for cell in points)))
    return format_table(('`--ffn`', 'hidden channels left', 'BCCD, box AP', 'DSB2018, mask AP'), lines)


def finetune_table() -> str:
    """AP after a fine-tune with another norm, and its difference to LayerNorm's."""
    ways = {
        'LayerNorm, 500 iterations': 'LayerNorm, 500 iterations',
        'LayerNorm, 150 more: the control': 'LayerNorm, 150 more',
        'PRepBN, 150 more': 'PRepBN, default start, 150 more',
        'PRepBN from statistics of LayerNorm, 150 more': 'PRepBN, calibrated start, 150 more',
        'TokenBN in its place, 150 more': 'TokenBN in its place, 150 more',
    }
    lines = []
    for title, name in ways.items():
        cells = []
        for dataset in ('bccd', 'dsb2018'):
            ap, control = (by_seed(load(f'finetune_{dataset}').rows, way) for way in (name, 'LayerNorm, 150 more'))
            difference = spread([ap[seed] - control[seed] for seed in ap], '{:+.1f}')
            cells += [spread(ap.values()), '' if 'control' in title else difference]
        lines.append((title, *cells))
    titles = ('way', 'BCCD, box AP', 'minus control', 'DSB2018, mask AP', 'minus control')
    return format_table(titles, lines)


def classifiers_table() -> str:
    """Time of fused classifiers over the same classifier with LayerNorm."""
    kinds = {'PRepBN': 'prepbn_', 'SLAB': 'slab_', 'UN': 'un_'}
    times = {Path(row['config']).name: row['median_ms'] for row in load('classifiers_cpu').rows}
    bases = [name for name in times if not name.startswith(tuple(kinds.values()))]
    lines = [
        (f'`{base}`', f'{times[base]:.0f}', *(
            f'{times[prefix + base] / times[base]:.2f}' if prefix + base in times else '' for prefix in kinds.values()
        ))
        for base in bases
    ]  # fmt: skip
    return format_table(('', 'LayerNorm, ms', *kinds), lines)


def runtimes_table(name: str, scope: str = 'detector', shown: Callable[[dict], bool] = bool) -> str:
    """Times of one file at 800x1216, of the rows that are shown."""
    return runtimes.table([row for row in load(name).select(size='800x1216', scope=scope) if shown(row)])


def is_shown(row: Mapping) -> bool:
    """Whether docs/latency.md shows a row."""
    return row.get('name') in SHOWN and row.get('form') not in HIDDEN_FORMS


def gpu_table(part: str, shown: Callable[[dict], bool] = bool) -> str:
    """A table of the GPU, of the rows that are shown."""
    results = load('gpu')
    results.rows = [row for row in results.rows if shown(row)]
    return gpu.tables(results)[part]


def study(name: str) -> str:
    results = load(f'norms_{name}')
    return study_table(results.rows, results.setting['metric'])


PROCESSORS = [file for files in runtimes.PROCESSORS.values() for file in files]
BLOCKS: dict[tuple[Path, str], Block] = {
    (README, 'processors'): Block([*PROCESSORS, 'gpu', 'int8'], runtimes.processors_table),
    (README, 'quick start'): Block(['quickstart'], lambda: quickstart.table(load('quickstart'))),
    (LATENCY, 'cpu'): Block(['runtimes'], partial(runtimes_table, 'runtimes', shown=is_shown)),
    (LATENCY, 'processors'): Block(PROCESSORS, runtimes.ratios_table),
    (LATENCY, 'channels'): Block(['runtimes_epyc'], lambda: runtimes.channels_table(load('runtimes_epyc').rows)),
    (DEPLOY, 'full size'): Block(['optimize_full'], lambda: optimize.table(load('optimize_full').rows)),
    (LATENCY, 'gpu'): Block(['gpu'], partial(gpu_table, 'detectors', is_shown)),
    (ABSORB, 'students'): Block(['absorb_hard_1600'], lambda: students_table(load('absorb_hard_1600').rows)),
    (ABSORB, 'channels'): Block(['ruler'], lambda: ruler.channels_table(load('ruler').rows)),
    (ABSORB, 'tuned'): Block([*HARD.values()], lambda: tuned_table(rows_of(HARD))),
    (ABSORB, 'norms'): Block([*ABSORBED.values()], absorbed_summary),
    (NORMS, 'norms'): Block([f'norms_{name}-norms-2000' for name in ('bccd', 'dsb2018')], norms_table),
    (NORMS, 'training'): Block(['training_cost_cpu', 'gpu'], training_summary),
    **{(BENCHMARKS, f'norms {name}'): Block([f'norms_{name}'], partial(study, name)) for name in STUDIES},
    (BENCHMARKS, 'training'): Block(['training_cost_cpu'], training_table),
    (BENCHMARKS, 'absorbed'): Block([*ABSORBED.values()], lambda: absorption_table(rows_of(ABSORBED))),
    (BENCHMARKS, 'ruler'): Block(['ruler'], lambda: ruler.summary_table(load('ruler').rows)),
    (BENCHMARKS, 'students'): Block(['ruler'], lambda: ruler.students_table(load('ruler').rows)),
    (BENCHMARKS, 'prices'): Block(['ruler'], lambda: ruler.prices_table(load('ruler').rows)),
    (BENCHMARKS, 'forms'): Block(['optimize_hard_320'], lambda: optimize.table(load('optimize_hard_320').rows)),
    (BENCHMARKS, 'channels'): Block(['absorb_bccd_600'], channels_ap_table),
    (BENCHMARKS, 'corruptions'): Block(['absorb_bccd_600'], corruptions_table),
    (BENCHMARKS, 'ablation'): Block(['absorb_ablation_bccd', 'absorb_ablation_dsb2018'], ablation_table),
    (BENCHMARKS, 'size'): Block(['absorb_size'], lambda: size.table(load('absorb_size'))),
    (BENCHMARKS, 'ffn'): Block(['ffn_bccd-norms-600', 'ffn_dsb2018-norms'], ffn_table),
    (BENCHMARKS, 'finetune'): Block(['finetune_bccd', 'finetune_dsb2018'], finetune_table),
    (BENCHMARKS, 'runtimes'): Block(['runtimes'], partial(runtimes_table, 'runtimes')),
    (BENCHMARKS, 'backbones'): Block(['runtimes'], partial(runtimes_table, 'runtimes', 'backbone')),
    (BENCHMARKS, 'epyc'): Block(['runtimes_epyc'], partial(runtimes_table, 'runtimes_epyc')),
    (BENCHMARKS, 'avx2'): Block(['runtimes_avx2'], partial(runtimes_table, 'runtimes_avx2')),
    (BENCHMARKS, 'cpu forms'): Block(['cpu_forms'], lambda: cpu_forms.table(load('cpu_forms').rows)),
    (BENCHMARKS, 'int8'): Block(['int8'], lambda: int8.table(load('int8').rows)),
    **{
        (BENCHMARKS, f'gpu {part}'): Block(['gpu'], partial(gpu_table, part))
        for part in ('detectors', 'parts', 'training')
    },
    (BENCHMARKS, 'classifiers'): Block(['classifiers_cpu'], classifiers_table),
}


# Sentences.


def span(values: Iterable[float], form: str = '{:.2f}') -> list[str]:
    """The least and the largest value."""
    values = list(values)
    return [form.format(min(values)), form.format(max(values))]


def ap(file: str, name: str) -> float:
    """Mean AP over seeds, from 0 to 100."""
    return 100 * statistics.mean(by_seed(load(file).rows, name).values())


def differences(file: str, name: str, control: str, key: str = 'AP') -> list[float]:
    """AP of each seed minus a value of the control with the same seed, from 0 to 1."""
    rows = load(file).rows
    first, second = by_seed(rows, name), by_seed(rows, control, key)
    return [first[seed] - second[seed] for seed in first if seed in second]


def gain(file: str, name: str, control: str, key: str = 'AP') -> str:
    """Mean of the differences, without a sign, from 0 to 100."""
    return f'{abs(100 * statistics.mean(differences(file, name, control, key))):.1f}'


def with_interval(file: str, name: str, control: str = 'LayerNorm') -> list[str]:
    """Mean of the differences, and both ends of its interval."""
    values = differences(file, name, control)
    return [f'{100 * statistics.mean(values):+.1f}', *re.findall(NUMBER, t_interval(values))]


def on_both(study: str, *names: str) -> list[str]:
    """Mean and interval of the difference to LayerNorm of each name, on BCCD and on DSB2018."""
    files = [f'norms_{dataset}-{study}' for dataset in ('bccd', 'dsb2018')]
    return [number for name in names for file in files for number in with_interval(file, name)]


def latency_sentences() -> list[Sentence]:
    files = ('runtimes_mmdet_deployed', 'runtimes_epyc', 'runtimes')
    mmdet, epyc, cpu = (select(file, scope='detector') for file in files)
    openvino, low = 'OpenVINO, bfloat16', 'deployed, bfloat16'
    deployed = [mmdet[f'{name}, mmdet', form] for form in ('deployed', low) for name in ('Swin-T', 'PVT-S')]
    norms = [[1 - row['to_layer_norm'] for (name, _), row in cpu.items() if name in WITHOUT_NORMS]]
    for dtype in ('float32', 'float16'):
        rows = load('gpu').select(part='detectors', form=f'graph, {dtype}')
        norms.append([1 - row['to_layer_norm'] for row in rows if row['name'].endswith('-PRepBN')])
    shares = [f'{100 * max(value, 0):.0f}' for values in norms for value in (min(values), max(values))]
    swin = [cpu['Swin-T, mmdet', openvino], cpu['Swin-T, LayerNorm', low]]
    swin += [epyc['Swin-T, LayerNorm', form] for form in (openvino, low)]
    twice = [row['to_mmdet'] for (name, form), row in cpu.items() if name.endswith('mmdet') and form == 'eager']
    (tests,) = load('gpu').select(part='tests', name='tests/test_cuda.py')
    outcomes, later = re.match('[.F]+', tests['summary'])[0], re.search(r'first (\d+) tests', tests['note'])[1]
    return [
        Sentence(
            'to {} (Swin-T) and {} (PVT-S) of its CPU time, in bfloat16 to {} and {}',
            [f'{row["to_mmdet"]:.2f}' for row in deployed],
        ),
        Sentence('in five rounds PVT-S in bfloat16 took {} to {} ms', span(deployed[-1]['times_ms'], '{:,.0f}')),
        Sentence(
            "Norms take {} to {} % of a CPU's time, by form; on an H100 {} to {} % in float32, {} to {} % in float16",
            shares,
        ),
        Sentence(
            "bfloat16: {} of mmdet's time for Swin-T with AMX (deployed: {}), {} with AVX-512 alone (deployed: {})",
            [f'{row["to_mmdet"]:.2f}' for row in swin],
        ),
        Sentence(
            'Mask R-CNNs take {} to {} of the time**, in every form',
            span(row['to_layer_norm'] for (name, _), row in epyc.items() if 'half' in name),
        ),
        Sentence(
            'measured twice in the same rounds, differs by up to {}', [f'{max(abs(1 - ratio) for ratio in twice):.2f}']
        ),
        Sentence('two of {} failed; a later run on an H100 passed the first {}', [str(len(outcomes)), later]),
    ]


def norms_sentences() -> list[Sentence]:
    long, short = 'norms_{}-norms-2000', 'norms_{}-norms'
    trained = {
        dataset: (by_seed(load(long.format(dataset)).rows, 'LayerNorm'), by_seed(load(file).rows, 'teacher'))
        for dataset, file in (('bccd', 'absorb_bccd_2000'), ('dsb2018', 'absorb_dsb2018_2000'))
    }
    moved = [abs(one[seed] - other[seed]) for one, other in trained.values() for seed in one]
    all_six = [spread([*one.values(), *other.values()]) for one, other in trained.values()]
    before, after = (ap(long.format('dsb2018'), 'LayerNorm'), ap('absorb_dsb2018_4000', 'teacher'))
    earlier, later = (ap(long.format('bccd'), 'LayerNorm'), ap('absorb_bccd_4000', 'teacher'))
    recalibrated = [
        gain(long.format('dsb2018'), name, name, 'AP_before_recalibration')
        for name in ('PRepBN, linear', 'BN+FFNBN', 'TokenBN')
    ]
    cut = [f'BN+FFNBN: {which}' for which in ('50 images, cut short after pass 8', 'as trained')]
    absorbed = [
        number
        for dataset in ('bccd', 'dsb2018')
        for number in with_interval(f'absorb_{dataset}_2000', 'all gone', 'teacher')
    ]
    return [
        Sentence(
            '**BN+FFNBN** over LayerNorm: {} [{}, {}] on BCCD and {} [{}, {}] on DSB2018.',
            on_both('norms-2000', 'BN+FFNBN'),
        ),
        Sentence(
            'LayerNorm with one more norm in each FFN has {} [{}, {}] and {} [{}, {}]',
            on_both('norms-2000', 'LayerNorm, one more in each FFN'),
        ),
        Sentence(
            'BatchNorm alone has {} [{}, {}] and {} [{}, {}]; PRepBN alone {} [{}, {}] and {} [{}, {}], with one more '
            'norm in each FFN {} [{}, {}] and {} [{}, {}].',
            on_both('norms-2000', 'TokenBN', 'PRepBN, linear', 'PRepBN, one more in each FFN'),
        ),
        Sentence(
            'BN+FFNBN over LayerNorm has {} [{}, {}] on BCCD (three seeds; seeds 1 and 3 were added because seed 0 was '
            'ahead) and {} [{}, {}] on DSB2018 (four seeds)',
            on_both('norms', 'BN+FFNBN'),
        ),
        Sentence(
            'LayerNorm as the four output norms gives PRepBN {} more on DSB2018',
            [gain(short.format('dsb2018'), 'PRepBN, output norms LayerNorm', 'PRepBN, linear')],
        ),
        Sentence(
            'After 2,000 iterations on DSB2018 it gains {} AP for PRepBN, {} for BN+FFNBN and {} for BatchNorm',
            recalibrated,
        ),
        Sentence(
            'it cost BN+FFNBN {} AP (one seed)',
            [f'{abs(100 * differences("norms_dsb2018-recalibration", *cut)[0]):.0f}'],
        ),
        Sentence(
            'statistics of images without padding cost BatchNorm {} AP (two seeds)',
            [gain('norms_bccd-pipeline', 'TokenBN: 100 images', 'TokenBN: as trained')],
        ),
        Sentence(
            'changes the AP of a trained LayerNorm detector by {} [{}, {}] on BCCD and {} [{}, {}] on DSB2018', absorbed
        ),
        Sentence(
            'over all six trainings it has {} ± {} and {} ± {}.',
            [number for cell in all_six for number in cell.split(' ± ')],
        ),
        Sentence('The AP of the same seed differed by up to {}', [f'{100 * max(moved):.1f}']),
        Sentence(
            'after 4,000 iterations LayerNorm has {}, {} more. On BCCD it has {} then, {} less',
            [f'{after:.1f}', f'{after - before:.0f}', f'{later:.1f}', f'{earlier - later:.0f}'],
        ),
    ]


def int8_sentences() -> list[Sentence]:
    rows = select('int8')

    def lost(*names: str, kinds: Sequence[str] = ('bbox', 'segm')) -> str:
        """The most AP that ONNX Runtime's int8 costs."""
        pairs = [(rows[name, 'float32'], rows[name, 'int8']) for name in names]
        return f'{100 * max(full[kind] - low[kind] for full, low in pairs for kind in kinds if kind in full):.1f}'

    again = 'dsb2018, absorbed again, {}'
    low, full = (by_seed(load('absorb_bccd').rows, *key) for key in (('bfloat16', 'teacher_AP'), ('teacher', 'AP')))
    return [
        Sentence(
            'Small LayerNorm Swins lost at most {} AP',
            [lost('bccd, LayerNorm', 'dsb2018, LayerNorm', 'hard, LayerNorm')],
        ),
        Sentence(
            'int8 then costs {} mask AP (without: {}), with the flag at most {} AP',
            [
                lost(again.format('lost layers in float32'), kinds=['segm']),
                lost(again.format('scaled channels'), kinds=['segm']),
                lost('dsb2018, absorbed for int8'),
            ],
        ),
        Sentence(
            'AP on BCCD moved little (three seeds, minus float32): LayerNorm {}, {}, {}.',
            # Zero has no minus.
            [f'{100 * (low[seed] - full[seed]) + 0.0:+.1f}' for seed in full],
        ),
    ]


def readme_sentences() -> list[Sentence]:
    rows = load('optimize_bccd').rows
    (best,) = (row for row in rows if row['recommended'])
    (base,) = (row for row in rows if row['name'] == 'eager')
    setting = load('quickstart').setting
    return [
        Sentence(
            "{} % of the multiply-adds takes {} of PyTorch's time, and box AP is {} instead of {}",
            [
                re.search(r'(\d+)% of the multiply-adds', best['name'])[1],
                f'{best["ratio"]:.2f}',
                f'{100 * best["AP"]:.1f}',
                f'{100 * base["AP"]:.1f}',
            ],
        ),
        Sentence('One seed, {} images, {} iterations', [str(setting['images']), str(setting['iterations'])]),
    ]


def benchmarks_sentences() -> list[Sentence]:
    rows, hard = select('int8'), {row['name']: row for row in load('norms_bccd-hard').rows}
    (low,) = load('absorb_hard_1600').select(name='teacher, bfloat16')
    kinds, absorbed = ('bbox', 'segm'), ('bccd, absorbed', 'bccd, absorbed for int8')
    absorbed += tuple(name.replace('bccd', 'dsb2018') for name in absorbed)

    def lost_in(name: str, form: str) -> list[float]:
        full, other = rows[name, 'float32'], rows[name, form]
        return [100 * (full[kind] - other[kind]) for kind in kinds if kind in full]

    nncf, ours = (lost_in('dsb2018, absorbed', form) for form in ('NNCF', 'int8'))
    in_openvino = [value for name in absorbed for value in lost_in(name, 'NNCF in OpenVINO')]
    settings = ('depths 2,2,12,2, embed 24, learning rate 2e-3', 'batch 1, 2000 iterations')
    return [
        Sentence(
            'In bfloat16 (deployed, AVX-512) seed 0 has {} and {}',
            [f'{100 * low[key]:.1f}' for key in ('AP', 'box_AP')],
        ),
        Sentence(
            'LayerNorm and TokenBN have {} and {} with 18 blocks at four times the learning rate, {} and {} with '
            'batches of one image',
            [f'{100 * hard[f"{name}: {norm}"]["AP"]:.1f}' for name in settings for norm in ('LayerNorm', 'TokenBN')],
        ),
        Sentence(
            'NNCF lost {} box and mask AP in ONNX Runtime where ours lost {} and {}; in OpenVINO NNCF lost {} to {} on '
            'the absorbed detectors',
            [f'{nncf[0]:.1f}', *(f'{value:.1f}' for value in ours), *span(in_openvino, '{:.1f}')],
        ),
    ]


def absorb_sentences() -> list[Sentence]:
    found = ruler.students(load('ruler').rows)
    errors, same = ([row[key] - row['kept'] for row in found] for key in ('retained', 'found_again'))
    root, other = (np.sqrt(np.mean(np.square(values))) for values in (errors, same))
    return [
        Sentence(
            'No student lost more than {} AP beyond its estimate',
            [f'{max(row["loss"] - row["expected"] for row in found):.1f}'],
        ),
        Sentence(
            'On {} students of {} teachers it was off by {} (rms; {} to {}), with the same images as the truth by {}.',
            [
                str(len(found)),
                str(len({row['teacher'] for row in found})),
                f'{root:.3f}',
                f'{min(errors):+.3f}',
                f'{max(errors):+.3f}',
                f'{other:.3f}',
            ],
        ),
    ]


def train_sentences() -> list[Sentence]:
    summary = load('interruptions').setting['summary']
    return [Sentence('({} of {} kills,', [str(summary['equal_to_the_last_bit']), str(summary['kills'])])]


SENTENCES: dict[Path, Callable[[], list[Sentence]]] = {
    README: readme_sentences,
    LATENCY: latency_sentences,
    NORMS: norms_sentences,
    ABSORB: absorb_sentences,
    DEPLOY: int8_sentences,
    TRAIN: train_sentences,
    BENCHMARKS: benchmarks_sentences,
}


def describe_unrecorded(page: Path) -> str:
    """Names the rows behind the tables of a page that have no commit, and those that have no device."""
    files = sorted({file for (where, _), block in BLOCKS.items() if where == page for file in block.files})
    sentences = []
    for key in ('commit', 'device'):
        parts = []
        for file in files:
            results = load(file)
            lacking = sum(results.environments[row['environment']][key] == NOT_RECORDED for row in results.rows)
            if lacking:
                share = '' if lacking == len(results.rows) else f' ({lacking} of {len(results.rows)})'
                parts.append(f'`{file}.json`{share}')
        if parts:
            sentences.append(f'Rows without a {key}: {", ".join(parts)}.')
    return fill(' '.join(sentences), 150, break_long_words=False, break_on_hyphens=False)


def write_numbers(page: Path, sentence: Sentence) -> None:
    """Writes the numbers of a sentence where its words stand in a page.

    Raises:
        ValueError: If the words do not stand there exactly once.
    """
    words = [f'({NUMBER})'.join(map(re.escape, word.split('{}'))) for word in sentence.text.split()]
    text = page.read_text()
    found = [*re.finditer(r'\s+'.join(words), text)]
    if len(found) != 1:
        raise ValueError(f'{page} has this sentence {len(found)} times, not once: {sentence.text}')
    # From the last number to the first, so that places before it stay.
    for index, number in reversed([*enumerate(sentence.numbers, 1)]):
        start, end = found[0].span(index)
        text = text[:start] + number + text[end:]
    page.write_text(text)


def write(root: Path) -> None:
    """Writes all tables and numbers into the pages below a folder."""
    for (page, mark), block in BLOCKS.items():
        replace_table(root / page, mark, block.make())
    for page in (LATENCY, ABSORB, NORMS, BENCHMARKS):
        replace_table(root / page, 'unrecorded', describe_unrecorded(page))
    for page, sentences in SENTENCES.items():
        for sentence in sentences():
            write_numbers(root / page, sentence)


def draw(root: Path) -> None:
    """Draws the pictures of the pages below a folder."""
    runtimes.draw(load('runtimes').select(size='800x1216', scope='detector'), root / 'docs/latency.svg')
    ruler.draw(load('ruler').rows, root / 'benchmarks/ruler.svg')


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write(ROOT)
    draw(ROOT)


if __name__ == '__main__':
    main()
