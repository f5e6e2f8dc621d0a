"""Checks random backbones and detectors by tests/fuzz_checks.py.

    python -m benchmarks.fuzz --draws 1000 --seed 0
    python -m benchmarks.fuzz --case 123

A case is drawn from its seed, SEED to SEED + DRAWS - 1; --case checks and shows a single one. Every model must fuse
exactly and stay the same after saving and loading.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from mmengine.registry import init_default_scope

from slab_det.runtime.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests'))
from fuzz_cases import draw_case  # noqa: E402
from fuzz_checks import check_case  # noqa: E402


def holds(seed: int) -> bool:
    """Checks one case; prints what fails, and how to see it again."""
    case = draw_case(seed)
    try:
        check_case(case)
    except Exception:
        print(f'\nSeed {seed} fails; python -m benchmarks.fuzz --case {seed}\n{traceback.format_exc()}', flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--draws', type=int, default=1000, help='(default %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='of the first case (default %(default)s)')
    parser.add_argument('--case', type=int, metavar='SEED', help='check and show this one')
    args = parser.parse_args()
    # The models are small: more threads only wait for each other.
    torch.set_num_threads(1)
    init_default_scope('mmdet')
    if args.case is not None:
        print('\n'.join(f'{name}: {value}' for name, value in asdict(draw_case(args.case)).items()))
        seeds = [args.case]
    else:
        seeds = Progress(range(args.seed, args.seed + args.draws))
    failed = [seed for seed in seeds if not holds(seed)]
    print(f'failed: {failed or "none"}')
    raise SystemExit(bool(failed))


if __name__ == '__main__':
    main()
