"""What slab_det.deploy gains on a CPU, against mmdet's stock Swin-T, interleaved in one process.

    python benchmarks/deploy_cpu.py --threads 2

Latency of backbone and whole detector, our LayerNorm Swin-T in the same forms beside them, and how the cost grows with
the pixels. The latency is measured as glibc hands out memory by default, and again with freed memory kept. Results are
added to benchmarks/results/deploy_cpu.json; its tiles and operators are from an earlier version of this script.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from slab_det.measure.latency import latency_table, measure_latency
from slab_det.measure.untrained import build_untrained

ROOT = Path(__file__).resolve().parents[1]
# Config, and the word for the model as it is built. The LayerNorm row shows what the norms cost.
ROWS = {
    'Swin-T': ('mask_rcnn_swin_t', 'ours'),
    'Swin-T-PRepBN': ('mask_rcnn_prepbn_swin_t', 'fused'),
    'SLAB-Swin-T': ('mask_rcnn_slab_swin_t', 'fused'),
}
# A quarter, one and four times the pixels of the main size.
SIZES = ((400, 608), (800, 1216), (1600, 2432))
KEPT = ', freed memory kept'


def _config(name: str) -> Path:
    return ROOT / 'configs' / f'{name}.py'


def build_all() -> dict[str, nn.Module]:
    models = {'Swin-T, mmdet': build_untrained(_config('mask_rcnn_swin_t'), dict(type='SwinTransformer'))}
    for name, (config, form) in ROWS.items():
        model = build_untrained(_config(config), {})
        models |= {
            f'{name}, {form}': model,
            f'{name}, deployed': slab_det.deploy(model),
            f'{name}, deployed in bfloat16': slab_det.deploy(model, torch.bfloat16),
        }
    return models


def measure_growth(models: Mapping[str, nn.Module], rounds: int, threads: int) -> dict[str, dict]:
    """Median latency of the backbones per size, and the exponent of the pixels between the smallest and the largest."""
    medians: dict[str, list[float]] = {name: [] for name in models}
    for size in SIZES:
        results = measure_latency(models, size=size, rounds=rounds, warmup=1, scope='backbone', threads=threads)
        for name, result in results.items():
            medians[name].append(result.median_ms)
    pixels = [height * width for height, width in SIZES]
    return {
        name: dict(
            median_ms=values, exponent=round(math.log(values[-1] / values[0]) / math.log(pixels[-1] / pixels[0]), 3)
        )
        for name, values in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1216), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/deploy_cpu.json')
    args = parser.parse_args()
    size, models, results = tuple(args.size), build_all(), {}
    # What is kept stays kept: the default comes first.
    for keep_memory, suffix in ((False, ''), (True, KEPT)):
        for scope in ('backbone', 'detector'):
            measured = measure_latency(
                models,
                size=size,
                rounds=args.rounds,
                warmup=2,
                scope=scope,
                threads=args.threads,
                progress=True,
                keep_memory=keep_memory,
            )
            print(latency_table(list(measured.values())), end='\n\n')
            results[scope + suffix] = dict(latency={name: result.to_dict() for name, result in measured.items()})
    growth = measure_growth(models, max(args.rounds // 5, 1), args.threads)
    print('\n'.join(f'{name}: latency grows with pixels^{row["exponent"]}' for name, row in growth.items()))
    results[f'growth{KEPT}'] = growth
    args.out.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.write_text(json.dumps(stored | results, indent=1) + '\n')
    print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
