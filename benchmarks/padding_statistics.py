"""What the padding of a training batch does to BatchNorm's statistics, norm by norm.

    python benchmarks/padding_statistics.py --data-root data/coco
    python benchmarks/padding_statistics.py --data-root data/coco --checkpoint work_dirs/RUN/iter_500.pth

Images of a batch are padded to the largest of them, and then to multiples of 32. The tokens there are part of what a
BatchNorm averages in training. The training pipeline is that of configs/ (480 to 800 pixels, half of the images
cropped), at batch 2, with and without mmdet's grouping by aspect ratio. Every norm of the backbone is a PRepBN at gamma
= 0 in training mode, so that it normalises by the padded batch as it would in a training; the statistics of its input
are taken over three sets of tokens:

- image: tokens that begin inside their image;
- test: those and each image's own padding to multiples of 32, which inference has too;
- batch: all of them.

Shifts are those of "batch" against the other two: of the mean in sigmas and of the log variance, absolute, averaged
over the channels of a norm. "pooled" compares statistics over all batches, what running averages tend to; "per batch"
compares within each batch, then averages: by so much training normalises otherwise.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import CheckpointLoader, Runner, set_random_seed
from mmengine.utils import ProgressBar
from torch import Tensor, nn

from slab_det.data import set_data_root
from slab_det.measure.environment import describe_environment
from slab_det.norms import set_gamma
from slab_det.norms.base import named_offline_norms
from slab_det.recalibration.moments import Moments

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results' / 'padding_statistics.json'
DIVISOR = 32
BACKBONES = {
    'Swin-32x2222': dict(embed_dims=32, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8)),
    'Swin-T': dict(),
}
# Tokens of one are in the next. The last is what training takes.
SETS = ('image', 'test', 'batch')


class PaddingStatistics:
    """Statistics of every norm's input over each of :data:`SETS`, pooled and batch by batch."""

    def __init__(self, backbone: nn.Module) -> None:
        self.pooled = defaultdict(lambda: {name: Moments() for name in SETS})
        # (norm, reference) -> one (mean shift, variance shift) per batch.
        self.per_batch = defaultdict(list)
        self.sizes: list[tuple[int, int]] = []
        self.batch_size = (0, 0)
        for name, norm in named_offline_norms(backbone):
            norm.register_forward_pre_hook(self._hook(name))

    def _hook(self, name: str) -> Callable:
        return lambda norm, args: self._add(name, args[0].detach())

    def _add(self, name: str, x: Tensor) -> None:
        regions = self._regions(x.shape[1])
        moments, batch = Moments(), {}
        for region, key in zip(regions, SETS, strict=True):
            part = Moments()
            if region.any():
                part.add(x[region])
            moments.merge(part)
            batch[key] = Moments()
            batch[key].merge(moments)
            self.pooled[name][key].merge(moments)
        for reference in SETS[:-1]:
            self.per_batch[name, reference].append(shifts(batch['batch'], batch[reference]))

    def _regions(self, num_tokens: int) -> Tensor:
        """Which tokens each set adds to the one before, (3, B, L)."""
        height, width = self.batch_size
        stride = round((height * width / num_tokens) ** 0.5)
        rows, columns = (stride * torch.arange(side // stride) for side in (height, width))

        def inside(sizes: Tensor) -> Tensor:
            below, right = rows < sizes[:, :1], columns < sizes[:, 1:]
            return (below[:, :, None] & right[:, None, :]).flatten(1)

        sizes = torch.tensor(self.sizes)
        image, test = inside(sizes), inside((sizes + DIVISOR - 1) // DIVISOR * DIVISOR)
        return torch.stack([image, test & ~image, ~test])

    def summary(self) -> dict[str, dict]:
        """Per reference and norm: mean over channels and largest channel of the pooled shifts, mean of the others."""
        result = {}
        for reference in SETS[:-1]:
            result[reference] = {}
            for name, sets in self.pooled.items():
                mean, var = shifts(sets['batch'], sets[reference])
                batch_mean, batch_var = (
                    torch.stack([pair[i].mean() for pair in self.per_batch[name, reference]]) for i in (0, 1)
                )
                values = dict(
                    pooled_mean_shift=mean.mean(),
                    pooled_mean_shift_max=mean.max(),
                    pooled_log_var_shift=var.mean(),
                    pooled_log_var_shift_max=var.max(),
                    batch_mean_shift=batch_mean.mean(),
                    batch_log_var_shift=batch_var.mean(),
                )
                result[reference][name] = {key: round(value.item(), 5) for key, value in values.items()}
        return result


def shifts(moments: Moments, reference: Moments) -> tuple[Tensor, Tensor]:
    """Distance of the means in the reference's sigmas and of the log variances, absolute, (1, C) each."""
    sigma = reference.var.sqrt().clamp(min=1e-12)
    return ((moments.mean - reference.mean) / sigma).abs(), (moments.var / reference.var).log().abs()


def build_backbone(options: dict, checkpoint: str | None) -> nn.Module:
    """In training mode at gamma = 0; random weights, or the backbone's of a detector's checkpoint."""
    torch.manual_seed(0)
    backbone = MODELS.build(dict(type='SLABSwin', norm_cfg=dict(type='PRepBN'), drop_path_rate=0.0, **options))
    backbone.init_weights()
    if checkpoint is not None:
        state = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')['state_dict']
        prefix = 'backbone.'
        backbone.load_state_dict(
            {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        )
    set_gamma(backbone, 0.0)
    return backbone.train()


@torch.no_grad()
def measure(backbone: nn.Module, loader_cfg: dict, preprocessor: nn.Module, epochs: int) -> dict:
    """Runs the training images through the backbone; the numbers of one row."""
    loader = Runner.build_dataloader(loader_cfg, seed=0)
    statistics = PaddingStatistics(backbone)
    counts = torch.zeros(3)
    num_batches = 0
    bar = ProgressBar(epochs * len(loader))
    for epoch in range(epochs):
        # Other pairs, other crops.
        loader.batch_sampler.sampler.set_epoch(epoch)
        set_random_seed(epoch)
        for data in loader:
            batch = preprocessor(data, training=True)
            statistics.sizes = [sample.img_shape for sample in batch['data_samples']]
            statistics.batch_size = tuple(batch['inputs'].shape[-2:])
            counts += statistics._regions(statistics.batch_size[0] * statistics.batch_size[1] // 16).sum((1, 2))
            backbone(batch['inputs'])
            num_batches += 1
            bar.update()
    print()
    _, own, between = (counts / counts.sum()).tolist()
    return dict(
        batches=num_batches,
        padded_tokens=round(own + between, 5),
        padded_by_the_batch=round(between, 5),
        shifts=statistics.summary(),
    )


def table(rows: dict[str, dict]) -> str:
    """Averages over the norms, and the largest norm, of every row."""
    lines = [
        '| row | padded | by the batch | against | pooled mean | pooled log var | batch mean | batch log var |',
        '|---|---:|---:|---|---:|---:|---:|---:|',
    ]
    keys = ('pooled_mean_shift', 'pooled_log_var_shift', 'batch_mean_shift', 'batch_log_var_shift')
    for name, row in rows.items():
        for reference, norms in row['shifts'].items():
            values = [[norm[key] for norm in norms.values()] for key in keys]
            cells = ' | '.join(f'{sum(v) / len(v):.3f} (max {max(v):.3f})' for v in values)
            lines.append(
                f'| {name} | {row["padded_tokens"]:.3f} | {row["padded_by_the_batch"]:.3f} | {reference} | {cells} |'
            )
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-root', default='data/coco')
    parser.add_argument('--backbone', choices=list(BACKBONES), default='Swin-32x2222')
    parser.add_argument('--checkpoint', metavar='FILE', help='of a PRepBN detector with this backbone')
    parser.add_argument('--batch-size', type=int, default=2)
    parser.add_argument('--epochs', type=int, default=2)
    parser.add_argument('--name', help='of the row; default is the backbone')
    parser.add_argument('--out', type=Path, default=RESULTS, help='JSON file to which the rows are added')
    args = parser.parse_args()
    init_default_scope('mmdet')
    cfg = Config.fromfile(ROOT / 'configs/_base_/datasets/coco_detection_ms_crop.py')
    set_data_root(cfg, args.data_root)
    preprocessor = MODELS.build(
        dict(
            type='DetDataPreprocessor',
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
            bgr_to_rgb=True,
            pad_size_divisor=DIVISOR,
        )
    )
    rows = {}
    for grouped in (True, False):
        loader = {**cfg.train_dataloader, 'batch_size': args.batch_size, 'num_workers': 0, 'persistent_workers': False}
        if not grouped:
            loader.pop('batch_sampler')
        name = f'{args.name or args.backbone}, {"grouped" if grouped else "not grouped"}'
        backbone = build_backbone(BACKBONES[args.backbone], args.checkpoint)
        rows[name] = dict(
            backbone=args.backbone,
            weights='trained' if args.checkpoint else 'random',
            batch_size=args.batch_size,
            grouped=grouped,
            epochs=args.epochs,
            **measure(backbone, loader, preprocessor, args.epochs),
        )
    print(table(rows))
    before = json.loads(args.out.read_text())['results'] if args.out.exists() else {}
    args.out.write_text(
        json.dumps(
            dict(
                scope='pipeline of configs/_base_/datasets/coco_detection_ms_crop.py; shifts are described in '
                'benchmarks/padding_statistics.py',
                data=Path(args.data_root).name,
                environment=describe_environment(),
                results={**before, **rows},
            ),
            indent=1,
        )
        + '\n'
    )
    print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
