"""Latency of the detectors of SLAB's Table 3 on a GPU, in several forms, each beside mmdet's own as built.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --scope backbone --rounds 40

Weights are random, with heads made to find 32 objects. As built, float16 is autocast; deployed, the layers are float16.
The rows and forms of one dtype are timed in the same rounds, and written to benchmarks/results/gpu.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import median

from torch import nn

from benchmarks.runtimes import ROOT, Row, build
from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import DTYPES, SCOPES, LatencyResult, measure_latency, repeat_ratios


def _family(name: str, config: str, backbone: str) -> dict[str, Row]:
    """mmdet's detector, ours with LayerNorm, and with PRepBN."""
    names = f'{name}, mmdet', f'{name}, LayerNorm'
    return {
        names[0]: Row(f'mask_rcnn_{config}', *names, type=backbone),
        names[1]: Row(f'mask_rcnn_{config}', *names),
        f'{name}-PRepBN': Row(f'mask_rcnn_prepbn_{config}', *names),
    }


SWIN, PVT = 'SwinTransformer', 'PyramidVisionTransformer'
ROWS = {
    **_family('Swin-T', 'swin_t', SWIN),
    'Flatten-Swin-T': Row('mask_rcnn_flatten_swin_t', 'Swin-T, mmdet', 'Swin-T, LayerNorm'),
    'SLAB-Swin-T': Row('mask_rcnn_slab_swin_t', 'Swin-T, mmdet', 'Swin-T, LayerNorm'),
    **_family('Swin-S', 'swin_s', SWIN),
    **_family('PVT-T', 'pvt_t', PVT),
    **_family('PVT-S', 'pvt_s', PVT),
}
FORMS = ('as built', 'deployed')


def measure(models: Mapping[str, nn.Module], dtype: str, args: argparse.Namespace) -> dict[str, dict[str, dict]]:
    """For each form and row milliseconds and a ratio to mmdet's as built."""
    variants = {
        f'{name}, {form}': slab_det.deploy(model, DTYPES[dtype]) if form == 'deployed' else model
        for (name, model), form in product(models.items(), FORMS)
    }
    options = dict(size=tuple(args.size), rounds=args.rounds, repeat=args.repeat, scope=args.scope, device=args.device)
    results = measure_latency(variants, dtype=dtype, warmup=5, progress=True, **options)

    def cell(name: str, form: str) -> dict:
        result: LatencyResult = results[f'{name}, {form}']
        ratios = repeat_ratios(result, results[f'{ROWS[name].stock}, as built'])
        return dict(
            median_ms=round(result.median_ms, 3),
            p95_ms=round(result.p95_ms, 3),
            ratio=round(median(ratios), 4),
            detections=result.detections,
        )

    return {f'{form}, {dtype}': {name: cell(name, form) for name in models} for form in FORMS}


def table(columns: Mapping[str, Mapping[str, dict]]) -> str:
    """Milliseconds of each row in each column, in brackets the ratio."""
    lines = [f'| | {" | ".join(columns)} |', '|---|' + '---:|' * len(columns)]
    for name in next(iter(columns.values())):
        cells = [f'{column[name]["median_ms"]:.1f} ({column[name]["ratio"]:.2f})' for column in columns.values()]
        lines.append(f'| {name} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--scope', choices=list(SCOPES), default='detector')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1333), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=100)
    parser.add_argument('--repeat', type=int, default=1)
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/gpu.json')
    args = parser.parse_args()
    models = {name: build(row).to(args.device) for name, row in ROWS.items()}
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    environment, columns = describe_environment(args.device), {}
    for dtype in ('float32', 'float16'):
        columns |= measure(models, dtype, args)
    results[args.scope] = dict(
        size=args.size, batch=1, rounds=args.rounds, repeat=args.repeat, environment=environment, columns=columns
    )
    args.out.write_text(json.dumps(results, indent=1) + '\n')
    height, width = args.size
    print(f'\n{args.scope}, batch 1, {height}x{width} (HxW), {environment["device"]}\n\n{table(columns)}')


if __name__ == '__main__':
    main()
