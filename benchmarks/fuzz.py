"""Draws random backbones and detectors and checks each: see tests/fuzz_checks.py.

    python -m benchmarks.fuzz --draws 1000 --seed 0
    python -m benchmarks.fuzz --case 123

A case is its seed: SEED to SEED + DRAWS - 1 are checked, and --case shows one of them. Every model fuses exactly and is
the same after saving and loading; every 20th, if it is a detector, is exported to ONNX, which computes the same. Counts
go into benchmarks/results/fuzz.json.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from mmengine.registry import init_default_scope

from slab_det.measure.environment import describe_environment
from slab_det.runtime.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / 'benchmarks' / 'results' / 'fuzz.json'
sys.path.insert(0, str(ROOT / 'tests'))
from fuzz_cases import Case, draw_case  # noqa: E402
from fuzz_checks import Outcome, check_case, check_onnx, is_exported  # noqa: E402

ONNX_EVERY = 20


def check(seed: int) -> Outcome | None:
    """Checks one case; prints what fails, and how to see it again. None if it failed."""
    case = draw_case(seed)
    try:
        outcome = check_case(case)
        if seed % ONNX_EVERY == 0 and is_exported(case):
            with tempfile.TemporaryDirectory() as folder:
                outcome = replace(outcome, onnx=check_onnx(case, Path(folder)))
    except Exception:
        print(f'\nSeed {seed} fails; python -m benchmarks.fuzz --case {seed}\n{traceback.format_exc()}', flush=True)
        return None
    return outcome


def summarize(outcomes: dict[int, Outcome | None], seconds: float) -> dict:
    """What was drawn, and how far fused models and exported files were from unfused models."""
    cases = [draw_case(seed) for seed in outcomes]
    done = [outcome for outcome in outcomes.values() if outcome is not None]
    ratios = [outcome.onnx for outcome in done if isinstance(outcome.onnx, float)]

    def count(value: Callable[[Case], str]) -> dict[str, int]:
        return dict(sorted(Counter(map(value, cases)).items()))

    return dict(
        seeds=[min(outcomes), max(outcomes)],
        failed=[seed for seed, outcome in outcomes.items() if outcome is None],
        fused=sum(outcome.fused for outcome in done),
        refused_with_gamma=sum(not outcome.fused for outcome in done),
        worst_float64=max((o.float64 for o in done if o.float64 is not None), default=None),
        worst_float32_ratio=max((o.float32_ratio for o in done if o.float32_ratio is not None), default=None),
        onnx=dict(
            exported=len(ratios),
            refused=sum(outcome.onnx == 'refused' for outcome in done),
            worst_ratio=max(ratios, default=None),
        ),
        parts=count(lambda case: case.part),
        backbones=count(lambda case: case.backbone['type']),
        norms=count(lambda case: case.backbone['norm_cfg']['type']),
        dtypes=count(lambda case: str(case.dtype).removeprefix('torch.')),
        seconds=round(seconds),
        environment=describe_environment(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--draws', type=int, default=1000, help='(default %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='of the first case (default %(default)s)')
    parser.add_argument('--case', type=int, metavar='SEED', help='check and show this one, and write nothing')
    args = parser.parse_args()
    # The models are small: more threads only wait for each other.
    torch.set_num_threads(1)
    init_default_scope('mmdet')
    if args.case is not None:
        print('\n'.join(f'{name}: {value}' for name, value in asdict(draw_case(args.case)).items()))
        outcome = check(args.case)
        print(outcome)
        raise SystemExit(outcome is None)
    start = time.monotonic()
    outcomes = {seed: check(seed) for seed in Progress(range(args.seed, args.seed + args.draws))}
    result = summarize(outcomes, time.monotonic() - start)
    RESULT.write_text(json.dumps(result, indent=1) + '\n')
    print(f'{result["fused"]} fused, failed: {result["failed"] or "none"}. Written to {RESULT}')
    raise SystemExit(bool(result['failed']))


if __name__ == '__main__':
    main()
