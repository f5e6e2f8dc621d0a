"""Compares this commit's speed, as ratios to mmdet in the same process, with stored ratios. It only reports.

    python -m benchmarks.speed_check --threads 2            # this commit / stored
    python -m benchmarks.speed_check --threads 2 --store    # makes this commit's ratios the stored ones

Ratios are compared where device, threads, size and dtype are the same; for anything else nothing is stored yet.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.untrained import build_untrained
from slab_det.common.record import format_table
from slab_det.measure.latency import LatencyResult, describe_scope, measure_latency

STOCK = {'type': 'SwinTransformer'}


class Check(NamedTuple):
    """Models that are measured together: config and changes of the backbone by name. Ratios are to the first."""

    scope: str
    size: tuple[int, int] | None  # (height, width); None takes the one of the command line
    models: Mapping[str, tuple[str, Mapping]]


CHECKS = (
    Check('backbone', None, {
        'Swin-T, mmdet': ('mask_rcnn_swin_t', STOCK),
        'Swin-T-PRepBN, fused': ('mask_rcnn_prepbn_swin_t', {}),
        'SLAB-Swin-T, fused': ('mask_rcnn_slab_swin_t', {}),
    }),
    Check('detector', (160, 192), {
        'quick start, mmdet': ('quickstart_mask_rcnn_swin', STOCK),
        'quick start, SLAB fused': ('quickstart_mask_rcnn_slab_swin', {}),
    }),
)  # fmt: skip


def measure(check: Check, args: argparse.Namespace) -> list[dict[str, LatencyResult]]:
    """Measures the models of a check as often as ``args.repeat`` says."""
    models = {
        name: build_untrained(ROOT / 'configs' / f'{config}.py', backbone)
        for name, (config, backbone) in check.models.items()
    }
    options = {name: getattr(args, name) for name in ('rounds', 'device', 'threads')}
    options |= dict(size=check.size or tuple(args.size), warmup=1, scope=check.scope, progress=True)
    return [measure_latency(models, **options) for _ in range(args.repeat)]


def ratios(repeats: Sequence[Mapping[str, LatencyResult]]) -> dict[str, dict[str, float]]:
    """Returns the ratio of each model to the first: the median of the repeats, and their range."""
    base, *others = repeats[0]
    found = {name: [repeat[name].median_ms / repeat[base].median_ms for repeat in repeats] for name in others}
    return {name: {'ratio': median(r), 'low': min(r), 'high': max(r)} for name, r in found.items()}


def show(ratio: Mapping | None) -> str:
    """A ratio with its range, for one cell."""
    return f'{ratio["ratio"]:.3f} ({ratio["low"]:.3f} – {ratio["high"]:.3f})' if ratio else '–'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1216), metavar=('H', 'W'), help='of the backbones')
    parser.add_argument('--rounds', type=int, default=5, help='(default %(default)s)')
    parser.add_argument('--repeat', type=int, default=3, help='whole measurements (default %(default)s)')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--file', type=Path, default=FOLDER / 'speed_check.json', help='the stored ratios')
    parser.add_argument('--store', action='store_true', help="store this commit's ratios")
    args = parser.parse_args()
    stored = Results(args.file, args.device)
    for check in CHECKS:
        repeats = measure(check, args)
        base_name, base = next(iter(repeats[0].items()))
        scope, lines = describe_scope(base.to_dict()), []
        for name, here in ratios(repeats).items():
            identity = dict(name=name, scope=scope)
            before = next(iter(stored.select(**identity)), None)
            quotient = f'{here["ratio"] / before["ratio"]:.3f}' if before else '–'
            lines.append((name, show(here), show(before), quotient))
            if args.store:
                made = dict(base=base_name, base_ms=base.median_ms, rounds=args.rounds, repeats=args.repeat)
                stored.add(identity, {**here, **made})
        titles = ('model', f'this commit ({stored.commit})', 'stored', 'this commit / stored')
        print(f'\n{scope}, over {base_name} at {base.median_ms:.1f} ms\n\n{format_table(titles, lines)}')


if __name__ == '__main__':
    main()
