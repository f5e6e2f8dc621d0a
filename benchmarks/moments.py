"""What it is worth that recalibration sums the squares of a norm's tokens in one array, interleaved in one process.

    python benchmarks/moments.py --threads 2

Written into benchmarks/results/moments_cpu.json, milliseconds.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from slab_det.measure.environment import describe_environment
from slab_det.recalibration.moments import Moments

# Maps of Swin-T's first two stages at 800x1216, and of the small Swin's at 512x512.
SHAPES = ((1, 200, 304, 96), (1, 100, 152, 192), (1, 128, 128, 32))


def in_several_arrays(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scatter as they were computed before."""
    tokens = tokens.flatten(0, -2).double()
    deviations = tokens - tokens.mean(0)
    return tokens.mean(0), (deviations * deviations).sum(0)


def in_one_array(tokens: Tensor) -> tuple[Tensor, Tensor]:
    moments = Moments()
    moments.add(tokens)
    return moments.mean[0], moments.scatter[0, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=30)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = dict(environment=describe_environment(torch.device('cpu')), rounds=args.rounds)
    for shape in SHAPES:
        tokens = torch.randn(shape)
        times = {form: [] for form in (in_several_arrays, in_one_array)}
        for turn in range(args.rounds):
            for form in [*times][:: -1 if turn % 2 else 1]:
                start = time.perf_counter()
                form(tokens)
                times[form].append((time.perf_counter() - start) * 1e3)
        before, after = (median(taken) for taken in times.values())
        print(f'{shape}: {before:.2f} ms in several arrays, {after:.2f} ms in one, ratio {after / before:.2f}')
        found['x'.join(map(str, shape))] = dict(several_arrays=before, one_array=after, ratio=after / before)
    path = Path(__file__).parent / 'results/moments_cpu.json'
    path.write_text(json.dumps(found, indent=1) + '\n')
    print(f'Written to {path}')


if __name__ == '__main__':
    main()
