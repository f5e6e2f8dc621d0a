"""Backbone latency of fused PRepBN-Swin-T and SLAB-Swin-T against mmdet's Swin-T, interleaved in one process.

    python benchmarks/backbone_latency.py --threads 2
"""
import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import nn

from slab_det.latency import latency_table, measure_latency

ROOT = Path(__file__).resolve().parents[1]
ROWS = {
    'Swin-T, mmdet': ('mask_rcnn_swin_t', dict(type='SwinTransformer')),
    'Swin-T, ours': ('mask_rcnn_swin_t', {}),
    'Swin-T-PRepBN, fused': ('mask_rcnn_prepbn_swin_t', {}),
    'SLAB-Swin-T, fused': ('mask_rcnn_slab_swin_t', {}),
}


def build(config: str, backbone: dict) -> nn.Module:
    """The detector of a config, random weights, fused where it can be."""
    cfg = Config.fromfile(ROOT / 'configs' / f'{config}.py')
    init_default_scope('mmdet')
    cfg.model.backbone.update(backbone)
    model = MODELS.build(cfg.model)
    slab_det.set_gamma(model, 0.0)
    # mmdet's Swin returns None from eval().
    model.eval()
    return slab_det.fuse(model, inplace=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1216), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=30)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--device', default='cpu')
    args = parser.parse_args()
    models = {name: build(*row) for name, row in ROWS.items()}
    results = measure_latency(models, size=tuple(args.size), rounds=args.rounds, warmup=3, scope='backbone',
                              device=args.device, threads=args.threads, progress=True)
    print(latency_table(list(results.values())))
    path = ROOT / 'benchmarks' / 'results' / f'backbone_latency_{args.device.replace(":", "")}.json'
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({name: result.to_dict() for name, result in results.items()}, indent=1) + '\n')
    print(f'Written to {path}')


if __name__ == '__main__':
    main()
