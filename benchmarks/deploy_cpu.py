"""What slab_det.deploy gains on a CPU, against mmdet's stock Swin-T, interleaved in one process.

    python benchmarks/deploy_cpu.py --threads 2

Latency of backbone and whole detector, that of our LayerNorm Swin-T in the same forms beside them; how the cost grows
with the pixels; how it depends on the size of a tile; and where the time goes, by operator. The latency is measured as
glibc hands out memory by default, and all again with freed memory kept: deployed models need fewer fresh pages, so they
gain less by that. Growth, tiles and operators come after that, with freed memory kept. Everything into
benchmarks/results/deploy_cpu.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from slab_det.deployment import tiles
from slab_det.measure.latency import LatencyResult, latency_table, measure_latency
from slab_det.measure.untrained import build_untrained

ROOT = Path(__file__).resolve().parents[1]
STOCK = 'Swin-T, mmdet'
# Config, and how it is called as it is built; none is deployed with LayerNorm to be fast, but to tell what norms cost.
ROWS = {
    'Swin-T': ('mask_rcnn_swin_t', 'ours'),
    'Swin-T-PRepBN': ('mask_rcnn_prepbn_swin_t', 'fused'),
    'SLAB-Swin-T': ('mask_rcnn_slab_swin_t', 'fused'),
}
# A quarter, one and four times the pixels of the main size.
SIZES = ((400, 608), (800, 1216), (1600, 2432))
KEPT = ', freed memory kept'
TILES = (256, 512, 1024, 2048, 4096, 8192, 1 << 20)


def build(config: str, backbone: Mapping) -> nn.Module:
    """The detector of a config of this repository, fused if it can be, with random weights and so many objects."""
    return build_untrained(ROOT / 'configs' / f'{config}.py', backbone)


def build_all() -> dict[str, nn.Module]:
    models = {STOCK: build('mask_rcnn_swin_t', dict(type='SwinTransformer'))}
    for name, (config, form) in ROWS.items():
        model = build(config, {})
        models |= {
            f'{name}, {form}': model,
            f'{name}, deployed': slab_det.deploy(model),
            f'{name}, deployed in bfloat16': slab_det.deploy(model, torch.bfloat16),
        }
    return models


def ratios(results: Mapping[str, LatencyResult]) -> dict[str, float]:
    """Median of each model over the median of the stock one."""
    return {name: round(result.median_ms / results[STOCK].median_ms, 3) for name, result in results.items()}


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


class Tiled(nn.Module):
    """A deployed backbone in tiles of so many tokens."""

    def __init__(self, fused: nn.Module, tokens: int) -> None:
        super().__init__()
        self.deployed, self.tokens = slab_det.deploy(fused), tokens

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tiles.CPU_TILE_TOKENS = self.tokens
        return self.deployed(x)


def measure_tiles(fused: nn.Module, size: tuple[int, int], rounds: int, threads: int) -> dict[str, float]:
    """Median latency of a backbone's deployed form per size of a tile, interleaved."""
    before = tiles.CPU_TILE_TOKENS
    try:
        results = measure_latency(
            {str(tokens): Tiled(fused, tokens) for tokens in TILES},
            size=size,
            rounds=rounds,
            warmup=1,
            scope='backbone',
            threads=threads,
        )
    finally:
        tiles.CPU_TILE_TOKENS = before
    return {tokens: result.median_ms for tokens, result in results.items()}


@torch.inference_mode()
def profile_operators(backbone: nn.Module, size: tuple[int, int], threads: int) -> dict[str, float]:
    """Milliseconds that each operator takes itself, of a backbone's third call; those below 1 % are left out."""
    torch.set_num_threads(threads)
    image = torch.randn(1, 3, *size)
    for _ in range(2):
        backbone(image)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        backbone(image)
    times = {event.key: event.self_cpu_time_total / 1e3 for event in profiler.key_averages()}
    total = sum(times.values())
    return {
        name: round(time, 1) for name, time in sorted(times.items(), key=lambda item: -item[1]) if time >= total / 100
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
            results[scope + suffix] = dict(
                ratios=ratios(measured), latency={name: result.to_dict() for name, result in measured.items()}
            )
    growth = measure_growth(models, max(args.rounds // 5, 1), args.threads)
    print('\n'.join(f'{name}: latency grows with pixels^{row["exponent"]}' for name, row in growth.items()))
    tokens = measure_tiles(models['Swin-T-PRepBN, fused'].backbone, size, max(args.rounds // 3, 1), args.threads)
    print('median ms per tokens of a tile:', tokens)
    operators = {name: profile_operators(model.backbone, size, args.threads) for name, model in models.items()}
    results |= {f'growth{KEPT}': growth, f'tiles{KEPT}': tokens, f'operators_ms{KEPT}': operators}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + '\n')
    print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
