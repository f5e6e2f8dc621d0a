"""Compares what `retained_ap` says about students without labels with the AP that they retain on the same images.

    python -m benchmarks.absorb.ruler hard CONFIG CHECKPOINT --data-root data/hard --seed 0

The students have all norms and fewer channels, in one family of layers alone or everywhere, by estimated losses or by
measured prices; or no norms; or are the teacher in bfloat16. The images are those of the validation set. Rows are added
to benchmarks/results/ruler.json; a row that is there is not measured again. `python -m benchmarks.pages` writes the
tables and the picture of benchmarks/README.md.

`retained` is the ruler with the teacher's detections in the mirrored images as the truth; `found_again`, beside it,
takes its detections in the images themselves, and so counts all that the student finds differently.
"""

import slab_det  # before mmdet: registers everything

# isort: split

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from benchmarks.results import FOLDER, Results
from slab_det import runtime
from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.channels.judge import Judge
from slab_det.absorption.channels.observed import Observer
from slab_det.absorption.channels.prices import measure_prices
from slab_det.absorption.channels.survey import Survey
from slab_det.absorption.images import read_images
from slab_det.backbones.adopt import adopt
from slab_det.checkpoints import build_detector
from slab_det.common.modules import copy_module, set_mode
from slab_det.common.record import format_table
from slab_det.compare.detections import detect
from slab_det.compare.ruler import retained_ap
from slab_det.measure.evaluate import evaluate
from slab_det.measure.figure import COLOURS, WIDTH, save_figure, styled
from slab_det.preflight import set_data_root
from slab_det.recalibration import recalibration_dataloader

# What the name of a group of channels begins with, by family.
FAMILIES = {
    'FFNs': ('.ffn',),
    'attention': ('.attn',),
    'FPN': ('neck',),
    'RPN': ('rpn_head',),
    'box head': ('roi_head.bbox_head',),
    'mask head': ('roi_head.mask_head',),
}
# Shares of the channels that stay in one family, and of the multiply-adds that stay everywhere.
SHARES = (0.5, 0.25)
EVERYWHERE = (0.7, 0.5, 0.33, 0.25)
# What the names of students begin with whose channels go everywhere, by estimated losses and by measured prices.
BY_ESTIMATES, BY_PRICES = 'everywhere', 'by measured prices'
RESULTS = FOLDER / 'ruler.json'


def measure(args: argparse.Namespace) -> None:
    """Measures every student of one teacher."""
    cfg = Config.fromfile(args.config)
    set_data_root(cfg, args.data_root)
    cfg.val_dataloader.update(num_workers=0, persistent_workers=False)
    teacher = build_detector(cfg, args.checkpoint)
    loader = Runner.build_dataloader(cfg.val_dataloader)
    images = recalibration_dataloader(cfg, args.num_images, 'test')
    results = Results(RESULTS)

    @cache
    def reference(mirrored: bool) -> list:
        return detect(teacher, loader, mirrored)

    def compare(model: nn.Module) -> dict:
        ap = evaluate(model, cfg)
        found = detect(model, loader)
        retained = retained_ap(reference(True), reference(False), found)
        same = retained_ap(reference(False), reference(False), found)
        kind = 'segm' if 'segm' in ap else 'bbox'
        other = dict(box_AP=ap['bbox']['AP']) if kind == 'segm' else {}
        values = dict(retained=retained.value, error=retained.error, found_again=same.value)
        return dict(AP=ap[kind]['AP'], **other, **values, images=len(found))

    def add(name: str, make: Callable[[], nn.Module]) -> None:
        if name != 'teacher' and not any(part in name for part in args.students):
            return
        print(results.measure_once(dict(teacher=args.name, seed=args.seed, name=name), lambda: compare(make())))

    add('teacher', lambda: teacher)
    add('bfloat16', lambda: slab_det.deploy(copy_module(teacher), dtype=torch.bfloat16))
    add('no norms', lambda: slab_det.absorb(teacher, images, channels=1, norms='remove', compare=False, progress=False))
    with torch.inference_mode(False), tempfile.TemporaryDirectory() as folder:
        model = copy_module(teacher)
        adopt(model)
        set_mode(model, False)
        stored = read_images(model, images, Path(folder), heads=True)
        survey = Survey(Observer(model, stored, int8=False))

        def add_student(name: str, counts: dict[str, int]) -> None:
            add(name, lambda: pruned(survey, counts))

        for family, parts in FAMILIES.items():
            units = [found for name, found in survey.estimates.items() if any(part in name for part in parts)]
            for share in SHARES if units else ():
                counts = {found.unit.name: nearest(found.counts, share * found.unit.count) for found in units}
                add_student(f'{family}, {share:g} of the channels', counts)
        shares = [share for share in EVERYWHERE if share > survey.least_share()]
        for share in shares:
            add_student(f'{BY_ESTIMATES}, {share:g} of the multiply-adds', survey.choose(share))
        survey.prices = measure_prices(survey, Judge(model, stored), Path(folder))
        for share in shares:
            add_student(f'{BY_PRICES}, {share:g} of the multiply-adds', survey.choose(share))


def pruned(survey: Survey, counts: dict[str, int]) -> nn.Module:
    """The teacher with these numbers of channels."""
    student = copy_module(survey.observer.model)
    survey.prune(student, counts, AbsorptionReport())
    return student


def nearest(values: Sequence[int], value: float) -> int:
    """The least of the values that are nearest to another one."""
    return min(values, key=lambda each: (abs(each - value), each))


def students(rows: Sequence[dict]) -> list[dict]:
    """The rows of students, each with ``kept``, the share of its teacher's AP on the labels."""
    teachers = {(row['teacher'], row['seed']): row for row in rows if row['name'] == 'teacher'}
    found = []
    for row in rows:
        teacher = teachers[row['teacher'], row['seed']]
        if row is not teacher:
            loss = 100 * (teacher['AP'] - row['AP'])
            expected = 100 * (teacher['AP'] * (1 - row['retained']))
            found.append(row | dict(kept=row['AP'] / teacher['AP'], loss=loss, expected=expected, of=teacher['AP']))
    return found


def summary_table(rows: Sequence[dict]) -> str:
    """For each teacher, how far both estimates are from the retained AP."""
    lines = []
    groups: dict[tuple, list[dict]] = {}
    for row in students(rows):
        groups.setdefault((row['teacher'], row['seed']), []).append(row)
        groups.setdefault(('all', ''), []).append(row)
    for (teacher, seed), group in sorted(groups.items(), key=lambda item: item[0][0] == 'all'):
        line = [teacher if seed == '' else f'{teacher}, seed {seed}', str(len(group))]
        line += ['', ''] if teacher == 'all' else [f'{100 * group[0]["of"]:.1f}', str(group[0]['images'])]
        for name in ('retained', 'found_again'):
            errors = np.array([row[name] - row['kept'] for row in group])
            line += [f'{np.sqrt((errors**2).mean()):.3f}', f'{errors.min():+.3f} to {errors.max():+.3f}']
        within = np.mean([abs(row['retained'] - row['kept']) <= 2 * row['error'] for row in group])
        lines.append([*line, f'{within:.0%}'])
    titles = ['teacher', 'students', 'its AP', 'images', 'ruler: rms error', 'from, to']
    titles += ['same images as truth: rms error', 'from, to', 'ruler within 2 standard errors']
    return format_table(titles, lines)


def students_table(rows: Sequence[dict]) -> str:
    """Every student."""
    titles = ('teacher', 'student', 'AP', "of the teacher's", 'ruler', 'same images as truth')
    lines = [
        (
            row['teacher'],
            row['name'],
            f'{100 * row["AP"]:.1f}',
            f'{row["kept"]:.3f}',
            f'{row["retained"]:.3f} ± {row["error"]:.3f}',
            f'{row["found_again"]:.3f}',
        )
        for row in students(rows)
    ]
    return format_table(titles, lines)


def prices_table(rows: Sequence[dict]) -> str:
    """AP of students whose channels go by estimated losses, and by measured prices."""
    lines, found = [], {(row['teacher'], row['name']): row for row in rows}
    for (teacher, name), priced in found.items():
        estimated = found.get((teacher, name.replace(BY_PRICES, BY_ESTIMATES)))
        if name.startswith(BY_PRICES) and estimated:
            line = [teacher, name.removeprefix(f'{BY_PRICES}, ').partition(' ')[0]]
            for key in ('AP', 'box_AP'):
                aps = [row.get(key) for row in (found[teacher, 'teacher'], estimated, priced)]
                line += ['–' if ap is None else f'{100 * ap:.1f}' for ap in aps]
            lines.append(line)
    titles = ['teacher', 'multiply-adds left', 'its AP', 'by estimated losses', 'by measured prices']
    return format_table([*titles, 'its box AP', *titles[3:]], lines)


def channels_table(rows: Sequence[dict]) -> str:
    """AP of the students of every teacher by measured prices: mask and box AP, or box AP alone."""
    found = {(row['teacher'], row['name']): row for row in rows}
    teachers = [teacher for teacher, name in found if name == 'teacher']

    def cell(teacher: str, name: str) -> str:
        aps = [found[teacher, name].get(key) for key in ('AP', 'box_AP')]
        return ', '.join(f'{100 * ap:.1f}' for ap in aps if ap is not None)

    lines = [['all, the teacher', *(cell(teacher, 'teacher') for teacher in teachers)]]
    for share in EVERYWHERE:
        name = f'{BY_PRICES}, {share:g} of the multiply-adds'
        lines.append([f'{share:.2f}', *(cell(teacher, name) for teacher in teachers)])
    return format_table(['multiply-adds left', *teachers], lines)


@styled
def draw(rows: Sequence[dict], path: Path) -> None:
    """Draws both estimates over the AP that students retain."""
    figure = Figure(figsize=(WIDTH, 3.2))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = dict(retained='truth: the teacher on mirrored images', found_again='truth: the teacher on the same images')
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        axes.set(title=title, xlabel="share of the teacher's AP, with labels")
        axes.axline((1, 1), slope=1, color=COLOURS[0], lw=0.8, ls='--')
        names = dict.fromkeys(row['teacher'] for row in rows)
        for teacher, colour, marker in zip(names, COLOURS, 'osD^', strict=False):
            shown = [row for row in students(rows) if row['teacher'] == teacher]
            x, y = ([row[key] for row in shown] for key in ('kept', name))
            errors = [2 * row['error'] for row in shown] if name == 'retained' else None
            axes.errorbar(x, y, errors, ls='', marker=marker, ms=4, color=colour, lw=0.7, label=teacher)
    panels[0].set_ylabel('estimated share, without labels')
    panels[0].legend(loc='lower right', title='teacher; lines: two standard errors')
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name')
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--seed', type=int, default=0, help='of the teacher')
    parser.add_argument('--students', nargs='+', default=[''], metavar='PART', help='only names with one of the parts')
    parser.add_argument('--num-images', type=int, default=100, help='to absorb on (default %(default)s)')
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    measure(args)
    rows = Results(RESULTS).rows
    print(f'{summary_table(rows)}\n\n{students_table(rows)}')


if __name__ == '__main__':
    main()
