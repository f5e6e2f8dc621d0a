"""Time and peak memory of an iteration of the short training after absorb, over one of the LayerNorm detector's own
training, interleaved in one process.

    python -m benchmarks.absorb.tune_cost --threads 2
    python -m benchmarks.absorb.tune_cost --device cuda --batch-size 4

Weights and images are random: neither changes what is computed.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import tempfile
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.runner import save_checkpoint
from torch import Tensor, nn

from benchmarks.absorb.run import TUNE
from benchmarks.training_cost import ROOT, Step, arguments, measure, table, write
from slab_det.checkpoints.build import build_detector
from slab_det.conversion import write_tune_config
from slab_det.fusion import save_fused
from slab_det.recalibration.fixed_point import recalibrate
from slab_det.runtime import read_checkpoint

CONFIG = 'configs/mask_rcnn_swin_t.py'


def tune_steps(folder: Path, args: argparse.Namespace) -> dict[str, Step]:
    """A step of the detector's own training, first, and of the short one with labels and without."""
    torch.manual_seed(0)
    cfg = Config.fromfile(ROOT / CONFIG)
    layer_norm = build_detector(cfg)
    teacher = folder / 'teacher.pth'
    save_checkpoint(dict(state_dict=layer_norm.state_dict()), str(teacher))
    # Affine where the LayerNorms were, as absorb leaves it.
    affine_cfg = Config.fromfile(ROOT / CONFIG)
    affine_cfg.model.backbone.norm_cfg = dict(type='TokenBN')
    affine = build_detector(affine_cfg)
    recalibrate(affine, [torch.randn(1, 3, 256, 256)], max_passes=1, progress=False)
    fused, fused_config = save_fused(slab_det.fuse(affine), affine_cfg, folder / 'fused.pth')
    tune = Config.fromfile(write_tune_config(cfg, fused_config, fused, teacher, Config.fromfile(TUNE)))
    batch = demo_mm_inputs(args.batch_size, (3, *args.size), [10] * args.batch_size, 80, with_mask=True)

    def step(model: nn.Module) -> Step:
        model = model.to(args.device)
        data = model.data_preprocessor(batch, training=True)

        def loss(model: nn.Module) -> Tensor:
            total, _ = model.parse_losses(model.loss(data['inputs'], data['data_samples']))
            return total

        return Step(model, loss)

    def distilled(task_weight: float) -> nn.Module:
        model = MODELS.build(dict(tune.model, task_weight=task_weight))
        model.load_state_dict(read_checkpoint(fused)['state_dict'])
        return model

    return {
        'LayerNorm, its own training': step(layer_norm),
        'short training, with labels': step(distilled(1.0)),
        'short training, pictures alone': step(distilled(0.0)),
    }


def main() -> None:
    args = arguments(__doc__, (800, 1333), 1).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        steps = tune_steps(Path(folder), args)
    results = {'Mask R-CNN, Swin-T': measure(steps, args.rounds)}
    print(table(results['Mask R-CNN, Swin-T'], 'Mask R-CNN, Swin-T'))
    write('tune_cost', args, 'forward, backward and AdamW of the detector', results)


if __name__ == '__main__':
    main()
