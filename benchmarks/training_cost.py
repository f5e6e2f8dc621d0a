"""Time and peak memory of a training step with PRepBN over one with LayerNorm, interleaved in one process.

    python -m benchmarks.training_cost --threads 2
    python -m benchmarks.training_cost --device cuda --size 800 1333

The models are the backbones Swin-T and PVT-T, forward, backward and AdamW; the rows differ in the norm alone. Whole
Mask R-CNNs with Swin-T are in `python -m benchmarks.gpu`.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from slab_det.checkpoints.build import build_detector
from slab_det.measure.environment import describe_environment
from slab_det.norms import set_gamma
from slab_det.runtime.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
BACKBONES = {
    'Swin-T': dict(type='SLABSwin'),
    'PVT-T': dict(type='SLABPVT', num_layers=[2, 2, 2, 2]),
}
CONFIG = 'mask_rcnn_swin_t.py'
LAYER_NORMS = {'SLABSwin': dict(type='LN'), 'SLABPVT': dict(type='LN', eps=1e-6)}


class Step:
    """One training step: forward, backward and AdamW.

    Args:
        model: With an optimizer of its own.
        loss: What is minimised, a scalar.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        self.model, self.loss = model.train(), loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.05)
        self.device = next(model.parameters()).device

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)


def seconds(step: Step) -> float:
    """Wall time of one step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_bytes(step: Step) -> int:
    """Peak memory of one step on top of the model and the optimizer's state."""
    step.optimizer.zero_grad()
    if step.device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(step.device)
        before = torch.cuda.memory_allocated(step.device)
        step()
        return torch.cuda.max_memory_allocated(step.device) - before
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with recorder:
        step()
    # Each allocation is an event with the bytes that it adds, each release one with those that it takes away.
    events = [event for event in recorder.profiler.kineto_results.events() if event.name() == '[memory]']
    return max(accumulate((event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), initial=0))


def backbone_steps(backbone: dict, images: Tensor) -> dict[str, Step]:
    """A step of the backbone with each norm, LayerNorm first."""

    def step(norm_cfg: dict, gamma: float = 0.0) -> Step:
        torch.manual_seed(0)
        model = MODELS.build(dict(**backbone, norm_cfg=norm_cfg, drop_path_rate=0.0)).to(images.device)
        set_gamma(model, gamma)
        return Step(model, lambda model: sum(out.square().mean() for out in model(images)))

    return _with_each_norm(step, LAYER_NORMS[backbone['type']])


def detector_steps(size: tuple[int, int], batch_size: int, device: str, config: str = CONFIG) -> dict[str, Step]:
    """A step of the whole detector of a config with each norm, on images of random pixels with seven objects each."""
    generator = np.random.default_rng(0)
    images = torch.randn(batch_size, 3, *size, device=device)
    samples = [_random_sample(size, generator).to(device) for _ in images]

    def step(norm_cfg: dict, gamma: float = 0.0) -> Step:
        cfg = Config.fromfile(ROOT / 'configs' / config)
        cfg.merge_from_dict({'model.backbone': dict(init_cfg=None, drop_path_rate=0.0)})
        cfg.model.backbone.norm_cfg = norm_cfg
        torch.manual_seed(0)
        model = build_detector(cfg).to(device)
        set_gamma(model, gamma)
        return Step(model, lambda model: model.parse_losses(model.loss(images, samples))[0])

    return _with_each_norm(step, dict(type='LN'))


def _random_sample(size: tuple[int, int], generator: np.random.Generator, objects: int = 7) -> DetDataSample:
    """What is known of an image in training; COCO has seven objects in an image."""
    shape = dict(img_shape=size, pad_shape=size, batch_input_shape=size, ori_shape=size, scale_factor=(1.0, 1.0))
    corner = generator.random((objects, 2)) * 0.6
    extent = 0.05 + generator.random((objects, 2)) * 0.35
    boxes = np.concatenate([corner, corner + extent], 1) * [*size[::-1], *size[::-1]]
    masks = np.zeros((objects, *size), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
        mask[top:bottom, left:right] = 1
    found = InstanceData(bboxes=torch.tensor(boxes, dtype=torch.float32), masks=BitmapMasks(masks, *size))
    found.labels = torch.arange(objects)
    return DetDataSample(metainfo=shape, gt_instances=found)


def _with_each_norm(step: Callable[..., Step], layer_norm: dict) -> dict[str, Step]:
    progressive = dict(type='PRepBN', ln_eps=layer_norm.get('eps', 1e-5))
    return {
        'LayerNorm': step(layer_norm),
        **{f'PRepBN, gamma {gamma:g}': step(progressive, gamma) for gamma in (0.5, 0.0)},
        'UN': step(dict(type='UN', warmup_iters=0)),
    }


def measure(rows: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Median time of a step and its peak memory, over those of the first row, for every row."""
    for step in rows.values():
        for _ in range(2):
            step()
    times = {name: [] for name in rows}
    for i in Progress(range(rounds)):
        # Another one begins each round: the first and the last would run twice in a row otherwise.
        first = i % len(rows)
        for name in [*list(rows)[first:], *list(rows)[:first]]:
            times[name].append(seconds(rows[name]))
    memory = {name: peak_bytes(step) for name, step in rows.items()}
    base = next(iter(rows))
    return {
        name: dict(
            median_ms=1e3 * torch.tensor(times[name]).median().item(),
            # The median of the ratios within a round: a slow minute of the machine is in both.
            time_ratio=torch.tensor([t / b for t, b in zip(times[name], times[base], strict=True)]).median().item(),
            peak_mib=memory[name] / 2**20,
            memory_ratio=memory[name] / memory[base],
        )
        for name in rows
    }


def table(results: dict[str, dict[str, float]], title: str) -> str:
    """What :func:`measure` returns, in Markdown."""
    lines = [f'| {title} | ms | time | MiB | memory |', '|---|---:|---:|---:|---:|']
    for row, r in results.items():
        cells = f'{r["median_ms"]:.0f}', f'{r["time_ratio"]:.3f}', f'{r["peak_mib"]:.0f}', f'{r["memory_ratio"]:.3f}'
        lines.append(f'| {row} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def arguments(doc: str, size: tuple[int, int], batch_size: int) -> argparse.ArgumentParser:
    """What a measurement of training steps is asked for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, nargs=2, default=size, metavar=('H', 'W'))
    parser.add_argument('--batch-size', type=int, default=batch_size)
    parser.add_argument('--rounds', type=int, default=12)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--device', default='cpu')
    return parser


def write(name: str, args: argparse.Namespace, timed: str, results: dict) -> None:
    """Stores the results, with what they hold for."""
    scope = dict(vars(args), dtype='float32', timed=timed)
    content = dict(scope=scope, environment=describe_environment(args.device), results=results)
    path = ROOT / 'benchmarks' / 'results' / f'{name}_{args.device.replace(":", "")}.json'
    path.write_text(json.dumps(content, indent=1) + '\n')
    print(f'Written to {path}')


def main() -> None:
    args = arguments(__doc__, (320, 416), 2).parse_args()
    torch.set_num_threads(args.threads)
    init_default_scope('mmdet')
    images = torch.randn(args.batch_size, 3, *args.size, device=args.device)
    results = {}
    for name, backbone in BACKBONES.items():
        results[name] = measure(backbone_steps(backbone, images), args.rounds)
        print(table(results[name], name))
    write('training_cost', args, 'forward, backward and AdamW of the backbone', results)


if __name__ == '__main__':
    main()
