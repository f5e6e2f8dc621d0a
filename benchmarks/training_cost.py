"""Time and peak memory of training steps with PRepBN and UN over those with LayerNorm, interleaved in one process.

    python -m benchmarks.training_cost --threads 2

The models are the backbones Swin-T and PVT-T, forward, backward and AdamW; the rows differ in the norm alone. Whole
Mask R-CNNs with Swin-T are in `python -m benchmarks.gpu`.
"""

import slab_det  # noqa: F401 (before mmdet: registers everything)

# isort: split

import argparse
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.results import FOLDER, ROOT, Results
from slab_det.checkpoints import build_detector
from slab_det.common.record import format_table
from slab_det.measure.timer import compare_times, time_in_turns
from slab_det.norms import set_gamma

BACKBONES = {
    'Swin-T': dict(type='SLABSwin'),
    'PVT-T': dict(type='SLABPVT', num_layers=[2, 2, 2, 2]),
}
LAYER_NORMS = {'SLABSwin': dict(type='LN'), 'SLABPVT': dict(type='LN', eps=1e-6)}
BATCH, SIZE = 2, (320, 416)


class Step:
    """One training step of a model with an optimizer of its own: forward, backward and AdamW.

    Args:
        model: The model, on its device.
        loss: Computes the loss of the model, a scalar.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        self.model, self.loss = model.train(), loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.05)
        self.device = next(model.parameters()).device

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()


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
    # An allocation is an event with its bytes, a release one with its bytes below zero.
    events = [event for event in recorder.profiler.kineto_results.events() if event.name() == '[memory]']
    return max(accumulate((event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), initial=0))


def backbone_steps(backbone: dict, images: Tensor) -> dict[str, Step]:
    """A step of the backbone with each norm, on images (B, 3, H, W); LayerNorm first."""

    def step(norm_cfg: dict, gamma: float = 0.0) -> Step:
        torch.manual_seed(0)
        model = MODELS.build(dict(**backbone, norm_cfg=norm_cfg, drop_path_rate=0.0)).to(images.device)
        set_gamma(model, gamma)
        return Step(model, lambda model: sum(out.square().mean() for out in model(images)))

    return _with_each_norm(step, LAYER_NORMS[backbone['type']])


def detector_steps(size: tuple[int, int], batch_size: int, device: str) -> dict[str, Step]:
    """A step of a whole Mask R-CNN with Swin-T, with each norm, on images of random pixels.

    Each image has seven random objects, the mean of COCO.
    """
    batch = demo_mm_inputs(batch_size, [[3, *size]] * batch_size, num_items=[7] * batch_size, with_mask=True)

    def step(norm_cfg: dict, gamma: float = 0.0) -> Step:
        cfg = Config.fromfile(ROOT / 'configs/mask_rcnn_swin_t.py')
        cfg.merge_from_dict({'model.backbone': dict(init_cfg=None, drop_path_rate=0.0)})
        cfg.model.backbone.norm_cfg = norm_cfg
        torch.manual_seed(0)
        model = build_detector(cfg).to(device)
        set_gamma(model, gamma)
        inputs = model.data_preprocessor(batch, True)
        return Step(model, lambda model: model.parse_losses(model(**inputs, mode='loss'))[0])

    return _with_each_norm(step, dict(type='LN'))


def _with_each_norm(step: Callable[..., Step], layer_norm: dict) -> dict[str, Step]:
    progressive = dict(type='PRepBN', ln_eps=layer_norm.get('eps', 1e-5))
    return {
        'LayerNorm': step(layer_norm),
        **{f'PRepBN, gamma {gamma:g}': step(progressive, gamma) for gamma in (0.5, 0.0)},
        'UN': step(dict(type='UN', warmup_iters=0)),
    }


def measure(rows: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Median time and peak memory of a step, and their ratios to the first row, for every row."""
    base, first = next(iter(rows.items()))
    times = time_in_turns(rows, rounds, warmup=2, device=first.device)
    memory = {name: peak_bytes(step) for name, step in rows.items()}
    return {
        name: dict(
            median_ms=float(np.median(times[name])),
            time_ratio=compare_times(times[name], times[base]).ratio,
            peak_mib=memory[name] / 2**20,
            memory_ratio=memory[name] / memory[base],
        )
        for name in rows
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=12)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    init_default_scope('mmdet')
    images = torch.randn(BATCH, 3, *SIZE)
    path = FOLDER / 'training_cost_cpu.json'
    path.unlink(missing_ok=True)
    timed = 'forward, backward and AdamW of the backbone'
    results = Results(path, 'cpu', **vars(args), size=SIZE, batch_size=BATCH, dtype='float32', timed=timed)
    for model, backbone in BACKBONES.items():
        for name, values in measure(backbone_steps(backbone, images), args.rounds).items():
            results.add(dict(model=model, name=name), values)
    keys = {'median_ms': '.0f', 'time_ratio': '.3f', 'peak_mib': '.0f', 'memory_ratio': '.3f'}
    lines = [
        (f'{row["model"]}, {row["name"]}', *(f'{row[key]:{form}}' for key, form in keys.items()))
        for row in results.rows
    ]
    print(format_table(('', 'ms', 'time', 'MiB', 'memory'), lines))


if __name__ == '__main__':
    main()
