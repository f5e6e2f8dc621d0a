"""Kernels launched and bytes moved by backbones, counted and not timed: what norms cost a GPU, on paper.

    python -m benchmarks.kernels

Each operator that is no view counts as one kernel, which reads its inputs and writes its outputs once; of
torch.compile the nodes that Inductor's scheduler is left with after fusion, which are a few more on a CPU than on a
GPU. Deployed backbones are counted as on a GPU: whole maps, without oneDNN. Written to benchmarks/results/kernels.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.runtimes import ROOT, ROWS, SWIN, build
from slab_det.checkpoints.build import build_detector
from slab_det.deployment import linear, tiles
from slab_det.measure.cost import more_formulas
from slab_det.measure.environment import library_versions
from slab_det.measure.untrained import prepare_untrained

UNFUSED = 'Swin-T-PRepBN, not fused'
NAMES = [*SWIN, UNFUSED, 'Swin-T-PRepBN', 'Swin-T-BN+FFNBN', 'SLAB-Swin-T']
# Tesla V100 SXM2 in float32: bytes and operations per second, from its data sheet; the seconds that one operator of
# PyTorch keeps the CPU busy are a guess.
BANDWIDTH, OPERATIONS, LAUNCH = 900e9, 15.7e12, 8e-6


class KernelCounter(TorchDispatchMode):
    """Lists bytes and floating-point operations of each kernel that would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.formulas = FlopCounterMode(custom_mapping=more_formulas()).flop_registry
        self.kernels: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or 'empty' in func.overloadpacket.__name__):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            # A view that repeats its values reads them once.
            moved = sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)
            formula = self.formulas.get(func.overloadpacket)
            self.kernels.append((moved, formula(*args, **(kwargs or {}), out_val=out) if formula else 0))
        return out


def count(run: Callable[[], object]) -> dict[str, float]:
    """Kernels, gigabytes and predicted milliseconds of one call, after one that fills what is kept per size."""
    run()
    with KernelCounter() as counter:
        run()
    on_gpu = sum(max(moved / BANDWIDTH, work / OPERATIONS) for moved, work in counter.kernels)
    return dict(
        kernels=len(counter.kernels),
        gigabytes=round(sum(moved for moved, _ in counter.kernels) / 1e9, 3),
        gpu_ms=round(on_gpu * 1e3, 2),
        launch_ms=round(len(counter.kernels) * LAUNCH * 1e3, 2),
    )


def count_compiled(model: nn.Module, x: Tensor) -> dict[str, float]:
    """The same of torch.compile, whose operations are not known."""
    torch._dynamo.reset()
    metrics.reset()
    torch.compile(model, dynamic=False)(x)
    return dict(kernels=len(metrics.nodes_num_elem), gigabytes=round(metrics.num_bytes_accessed / 1e9, 3))


def build_unfused() -> nn.Module:
    """Swin-T-PRepBN after training, with its norms."""
    cfg = Config.fromfile(ROOT / 'configs' / f'{ROWS["Swin-T-PRepBN"].config}.py')
    cfg.model.backbone.init_cfg = None
    model = build_detector(cfg)
    prepare_untrained(model)
    return model


def table(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Kernels and gigabytes; of PyTorch's own operators also the predicted times of the GPU and of launching."""
    lines = [
        '| | as built | ms on a V100: work, launches | deployed | ms | torch.compile |',
        '|---|---:|---:|---:|---:|---:|',
    ]
    for name, forms in rows.items():
        cells = []
        for form in ('as built', 'deployed', 'compiled'):
            values = forms.get(form)
            cells.append(f'{values["kernels"]}, {values["gigabytes"]:.2f} GB' if values else '–')
            if form != 'compiled':
                cells.append(f'{values["gpu_ms"]:.1f}, {values["launch_ms"]:.1f}' if values else '–')
        lines.append(f'| {name} | {" | ".join(cells)} |')
    return '\n'.join(lines)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/kernels.json')
    args = parser.parse_args()
    # Inductor counts what it tells, and takes nothing from an earlier run; mmdet's blocks are a graph each.
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)
    compile_fx.inductor_metrics_log.propagate = False
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.config.recompile_limit = 64
    # As on other devices than a CPU.
    tiles.CPU_TILE_TOKENS, linear.ONEDNN_DTYPES = None, ()
    x, rows = torch.randn(1, 3, 800, 1216), {}
    for name in NAMES:
        backbone = (build_unfused() if name == UNFUSED else build(ROWS[name])).backbone
        rows[name] = {'as built': count(lambda: backbone(x))}  # noqa: B023
        if name not in (SWIN[0], UNFUSED):
            deployed = slab_det.deploy(backbone)
            rows[name]['deployed'] = count(lambda: deployed(x))  # noqa: B023
        rows[name]['compiled'] = count_compiled(backbone, x)
        print(name, rows[name], flush=True)
    results = dict(size=[800, 1216], batch=1, dtype='float32', versions=library_versions())
    results |= dict(bandwidth=BANDWIDTH, operations=OPERATIONS, launch_seconds=LAUNCH, rows=rows)
    args.out.write_text(json.dumps(results, indent=1) + '\n')
    print(table(rows))


if __name__ == '__main__':
    main()
