"""Latency of the detectors of SLAB's Table 3 on a GPU, as built and deployed, each beside mmdet's own.

    python -m benchmarks.gpu --dtypes float32 float16

Weights are random, with 32 objects in every detector. As built, float16 is autocast; deployed, the layers are float16.
All rows and both forms of a dtype are measured interleaved and go to benchmarks/results/gpu.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from torch import nn

from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import DTYPES, SCOPES, LatencyResult, measure_latency, repeat_ratios
from slab_det.measure.untrained import build_untrained

ROOT = Path(__file__).resolve().parents[1]


class Row(NamedTuple):
    """A detector.

    Attributes:
        config: Its name in configs/.
        stock: The row that its times are divided by.
        type: Of its backbone, instead of the config's.
    """

    config: str
    stock: str
    type: str = ''


def _family(name: str, config: str, kind: str) -> dict[str, Row]:
    stock = f'{name}, mmdet'
    return {
        stock: Row(f'mask_rcnn_{config}', stock, kind),
        f'{name}, LayerNorm': Row(f'mask_rcnn_{config}', stock),
        f'{name}-PRepBN': Row(f'mask_rcnn_prepbn_{config}', stock),
    }


SWIN, PVT = 'SwinTransformer', 'PyramidVisionTransformer'
ROWS = {
    **_family('Swin-T', 'swin_t', SWIN),
    'Flatten-Swin-T': Row('mask_rcnn_flatten_swin_t', 'Swin-T, mmdet'),
    'SLAB-Swin-T': Row('mask_rcnn_slab_swin_t', 'Swin-T, mmdet'),
    **_family('Swin-S', 'swin_s', SWIN),
    **_family('PVT-T', 'pvt_t', PVT),
    **_family('PVT-S', 'pvt_s', PVT),
}
FORMS = ('as built', 'deployed')


def build(row: Row, device: str) -> nn.Module:
    """The detector of a row, fused where its norms can be."""
    changes = {'type': row.type} if row.type else {}
    return build_untrained(ROOT / 'configs' / f'{row.config}.py', changes).to(device)


def measure(models: Mapping[str, nn.Module], dtype: str, args: argparse.Namespace) -> dict[str, dict[str, dict]]:
    """For each form and row the milliseconds, and the ratio to mmdet's as built."""
    precision = None if dtype == 'float32' else DTYPES[dtype]
    forms = {
        f'{name}, {form}': slab_det.deploy(model, precision) if form == 'deployed' else model
        for (name, model), form in product(models.items(), FORMS)
    }
    options = dict(size=tuple(args.size), rounds=args.rounds, scope=args.scope, device=args.device)
    results = measure_latency(forms, dtype=dtype, warmup=5, progress=True, **options)

    def cell(name: str, form: str) -> dict:
        result: LatencyResult = results[f'{name}, {form}']
        (ratio,) = repeat_ratios(result, results[f'{ROWS[name].stock}, as built'])
        return dict(median_ms=round(result.median_ms, 3), p95_ms=round(result.p95_ms, 3), to_mmdet=round(ratio, 4))

    return {form: {name: cell(name, form) for name in models} for form in FORMS}


def table(columns: Mapping[str, Mapping[str, dict]]) -> str:
    """Milliseconds of each row in each column, in brackets over mmdet's as built in the same dtype."""
    lines = [f'| | {" | ".join(columns)} |', '|---|' + '---:|' * len(columns)]
    for name in ROWS:
        cells = [column.get(name) for column in columns.values()]
        if any(cells):
            texts = [f'{cell["median_ms"]:.1f} ({cell["to_mmdet"]:.2f})' if cell else '–' for cell in cells]
            lines.append(f'| {name} | {" | ".join(texts)} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', nargs='+', choices=list(ROWS), default=list(ROWS), metavar='ROW')
    parser.add_argument('--dtypes', nargs='+', choices=list(DTYPES), default=['float32', 'float16'])
    parser.add_argument('--scope', choices=list(SCOPES), default='detector')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1333), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=100)
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/gpu.json')
    args = parser.parse_args()
    names = dict.fromkeys(name for row in args.rows for name in (ROWS[row].stock, row))
    models = {name: build(ROWS[name], args.device) for name in names}
    results = json.loads(args.out.read_text()) if args.out.exists() else {'scopes': {}}
    results |= dict(size=args.size, batch=1, environment=describe_environment(args.device))
    scope = results['scopes'][args.scope] = dict(rounds=args.rounds, columns={})
    for dtype in args.dtypes:
        scope['columns'] |= {f'{form}, {dtype}': column for form, column in measure(models, dtype, args).items()}
        args.out.write_text(json.dumps(results, indent=1) + '\n')
    height, width = args.size
    print(f'\n{args.scope}, batch 1, {height}x{width} (HxW), {results["environment"]["device"]}')
    print(f'\n{table(scope["columns"])}')


if __name__ == '__main__':
    main()
