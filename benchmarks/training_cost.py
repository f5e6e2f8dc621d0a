"""Time and peak memory of a training step with PRepBN over one with LayerNorm, interleaved in one process.

    python -m benchmarks.training_cost --threads 2
    python -m benchmarks.training_cost --device cuda --size 800 1333

The models are the backbones Swin-T and PVT-T, forward, backward and AdamW; the rows differ in the norm alone.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import time
from itertools import accumulate
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slab_det.measure.environment import describe_environment
from slab_det.norms import set_gamma
from slab_det.runtime.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
BACKBONES = {
    'Swin-T': dict(type='SLABSwin'),
    'PVT-T': dict(type='SLABPVT', num_layers=[2, 2, 2, 2]),
}
LAYER_NORMS = {'SLABSwin': dict(type='LN'), 'SLABPVT': dict(type='LN', eps=1e-6)}


class Step:
    """One training step of a backbone, with a model and an optimizer of its own."""

    def __init__(self, backbone: dict, norm_cfg: dict, device: str, gamma: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = MODELS.build(dict(**backbone, norm_cfg=norm_cfg, drop_path_rate=0.0)).to(device).train()
        set_gamma(self.model, gamma)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, weight_decay=0.05)

    def __call__(self, images: Tensor) -> None:
        self.optimizer.zero_grad()
        sum(out.square().mean() for out in self.model(images)).backward()
        self.optimizer.step()


def seconds(step: Step, images: Tensor) -> float:
    """Wall time of one step."""
    if images.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Step, images: Tensor) -> int:
    """Peak memory of one step on top of the model and the optimizer's state."""
    step.optimizer.zero_grad()
    if images.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(images)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with recorder:
        step(images)
    # Each allocation is an event with the bytes that it adds, each release one with those that it takes away.
    events = [event for event in recorder.profiler.kineto_results.events() if event.name() == '[memory]']
    return max(accumulate((event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), initial=0))


def measure(backbone: dict, images: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Median time of a step and its peak memory, over those with LayerNorm, for every row."""
    device = str(images.device)
    layer_norm = LAYER_NORMS[backbone['type']]
    progressive = dict(type='PRepBN', ln_eps=layer_norm.get('eps', 1e-5))
    rows = {'LayerNorm': Step(backbone, layer_norm, device)}
    for gamma in (0.5, 0.0):
        rows[f'PRepBN, gamma {gamma:g}'] = Step(backbone, progressive, device, gamma)
    rows['UN'] = Step(backbone, dict(type='UN', warmup_iters=0), device)
    for step in rows.values():
        for _ in range(2):
            step(images)
    times = {name: [] for name in rows}
    for i in Progress(range(rounds)):
        # Another one begins each round: the first and the last would run twice in a row otherwise.
        first = i % len(rows)
        for name in [*list(rows)[first:], *list(rows)[:first]]:
            times[name].append(seconds(rows[name], images))
    memory = {name: peak_bytes(step, images) for name, step in rows.items()}
    base = times['LayerNorm']
    return {
        name: dict(
            median_ms=1e3 * torch.tensor(times[name]).median().item(),
            # The median of the ratios within a round: a slow minute of the machine is in both.
            time_ratio=torch.tensor([t / b for t, b in zip(times[name], base, strict=True)]).median().item(),
            peak_mib=memory[name] / 2**20,
            memory_ratio=memory[name] / memory['LayerNorm'],
        )
        for name in rows
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, nargs=2, default=(320, 416), metavar=('H', 'W'))
    parser.add_argument('--batch-size', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=12)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--device', default='cpu')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    init_default_scope('mmdet')
    images = torch.randn(args.batch_size, 3, *args.size, device=args.device)
    results = {}
    for name, backbone in BACKBONES.items():
        results[name] = measure(backbone, images, args.rounds)
        print(f'{name}\n| norm | ms | time | MiB | memory |\n|---|---:|---:|---:|---:|')
        for row, r in results[name].items():
            print(
                f'| {row} | {r["median_ms"]:.0f} | {r["time_ratio"]:.3f} | {r["peak_mib"]:.0f} '
                f'| {r["memory_ratio"]:.3f} |'
            )
    scope = dict(vars(args), dtype='float32', timed='forward, backward and AdamW of the backbone')
    content = dict(scope=scope, environment=describe_environment(args.device), results=results)
    path = ROOT / 'benchmarks' / 'results' / f'training_cost_{args.device.replace(":", "")}.json'
    path.write_text(json.dumps(content, indent=1) + '\n')
    print(f'Written to {path}')


if __name__ == '__main__':
    main()
