"""What each part of a Mask R-CNN takes on a CPU, and how near it comes to the fastest matrix product.

    python benchmarks/parts.py --threads 2

mmdet's detector as built, and ours deployed in float32 and bfloat16, all in the same rounds; from the bytes of an
image file to boxes and pasted masks. Rates are of the multiply-adds that the model has as built, so that a form that
computes the same with fewer may pass the fastest product. Written to benchmarks/results/parts.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import cv2
import torch
from torch import nn

from benchmarks.runtimes import FORMS, ROOT, ROWS, SWIN, build, measure, torch_call
from slab_det.deployment.linear import linear
from slab_det.measure.cost import count_multiply_adds
from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import keep_freed_memory

ROW = 'Swin-T-PRepBN'
PARTS = {
    'backbone': 'backbone',
    'FPN': 'neck',
    'RPN': 'rpn_head',
    'RoIAlign of boxes': 'roi_head.bbox_roi_extractor',
    'box head': 'roi_head.bbox_head',
    'RoIAlign of masks': 'roi_head.mask_roi_extractor',
    'mask head': 'roi_head.mask_head',
}
REST = 'the rest'


def watch(model: nn.Module) -> dict[str, list[float]]:
    """The seconds of each call of each part, which grow as the model runs."""
    seconds: dict[str, list[float]] = {name: [] for name in PARTS}

    def start(name: str, *_: object) -> None:
        seconds[name].append(-time.perf_counter())

    def stop(name: str, *_: object) -> None:
        seconds[name][-1] += time.perf_counter()

    for name, path in PARTS.items():
        part = model.get_submodule(path)
        # Around what deploy() adds to a part.
        part.register_forward_pre_hook(partial(start, name), prepend=True)
        part.register_forward_hook(partial(stop, name))
    return seconds


def count(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Multiply-adds of each part."""
    counts = dict.fromkeys(PARTS, 0)

    def counted(name: str, forward: Callable, *args: object, **kwargs: object) -> object:
        outputs = []
        counts[name] += count_multiply_adds(lambda: outputs.append(forward(*args, **kwargs)))
        return outputs[0]

    parts = {name: model.get_submodule(path) for name, path in PARTS.items()}
    for name, part in parts.items():
        part.forward = partial(counted, name, part.forward)
    run()
    for part in parts.values():
        del part.forward
    return counts


@torch.inference_mode()
def fastest_product(dtype: torch.dtype) -> float:
    """G multiply-adds per second of a matrix product of 2048 x 1024 x 1024, the best of 20."""
    x, weight = torch.randn(2048, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        linear(x, weight, None)
        times.append(time.perf_counter() - start)
    return round(2048 * 1024 * 1024 / min(times) / 1e9, 1)


def table(results: Mapping) -> str:
    """Milliseconds, and in brackets G multiply-adds per second."""
    forms = results['forms']
    lines = [f'| | G multiply-adds | {" | ".join(forms)} |', '|---|---:|' + '---:|' * len(forms)]
    for name in [*PARTS, REST]:
        work = results['multiply_adds'].get(name, 0) / 1e9
        cells = [
            f'{form["ms"][name]:.0f}' + f' ({work / form["ms"][name] * 1e3:.0f})' * (work > 0.5)
            for form in forms.values()
        ]
        lines.append(f'| {name} | {f"{work:.1f}" if work > 0.5 else "–"} | {" | ".join(cells)} |')
    total = [f'{form["total_ms"]:.0f} ({form["to_mmdet"]:.2f} of mmdet)' for form in forms.values()]
    lines.append(f'| all | {sum(results["multiply_adds"].values()) / 1e9:.1f} | {" | ".join(total)} |')
    peaks = [f'({form["fastest_product"]:.0f})' for form in forms.values()]
    lines.append(f'| a matrix product | | {" | ".join(peaks)} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/parts.json')
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    pixels = torch.randint(0, 256, (800, 1216, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    content = cv2.imencode('.jpg', pixels.numpy())[1].tobytes()
    stock, ours = build(ROWS[SWIN[0]]), build(ROWS[ROW])
    rows = {f'{SWIN[0]}, as built': (stock, 'as built')}
    rows |= {f'{ROW}, {form}': (ours, form) for form in ('deployed', 'deployed, bfloat16')}
    calls, seconds = {}, {}
    for name, (model, form) in rows.items():
        if form != 'as built':
            model = slab_det.deploy(model, None if form == 'deployed' else torch.bfloat16)
        calls[name] = torch_call(model, 'detector', FORMS['as built'], content)
        if model is stock:
            multiply_adds = count(model, calls[name])
        seconds[name] = watch(model)
    times = measure(calls, args.rounds, 'Mask R-CNN')
    mmdet = next(iter(times.values()))
    forms = {}
    for name, totals in times.items():
        # Of each part the milliseconds per round; RoI heads may run it several times. The first round does not count.
        ms = {
            part: [sum(each) * 1e3 for each in zip(*[iter(calls)] * (len(calls) // (args.rounds + 1)), strict=True)][1:]
            for part, calls in seconds[name].items()
        }
        ms[REST] = [total - sum(parts) for total, *parts in zip(totals, *ms.values(), strict=True)]
        forms[name] = dict(
            ms={part: round(statistics.median(values), 1) for part, values in ms.items()},
            total_ms=statistics.median(totals),
            to_mmdet=round(statistics.median(one / other for one, other in zip(totals, mmdet, strict=True)), 3),
            fastest_product=fastest_product(torch.bfloat16 if 'bfloat16' in name else torch.float32),
        )
    results = dict(rounds=args.rounds, threads=args.threads, size=[800, 1216], environment=describe_environment())
    results |= dict(multiply_adds=multiply_adds, forms=forms)
    args.out.write_text(json.dumps(results, indent=1) + '\n')
    print(table(results))


if __name__ == '__main__':
    main()
