"""What it is worth that fused Swin's tokens lie together after its first convolution, interleaved in one process.

    python benchmarks/token_layout.py --threads 2

Untrained models, backbone and neck; freed memory is kept, for fresh pages cost more than this is about. Written into
benchmarks/results/token_layout_DEVICE.json.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
from pathlib import Path

import torch
from mmengine.config import Config
from torch import nn

from slab_det.checkpoints.build import build_detector
from slab_det.measure.latency import latency_table, measure_latency

ROOT = Path(__file__).resolve().parents[1]
SMALL, SWIN_T = 'configs/_base_/models/mask_rcnn_swin_small.py', 'configs/mask_rcnn_prepbn_swin_t.py'
# Config, (H, W).
CASES = ((SMALL, (240, 320)), (SMALL, (512, 512)), (SMALL, (800, 1216)), (SWIN_T, (800, 1216)))


def build(config: str, norm: str) -> nn.Module:
    """A detector with random weights, fused where its norm can be."""
    cfg = Config.fromfile(ROOT / config)
    cfg.model.backbone.norm_cfg = dict(type=norm)
    model = build_detector(cfg)
    slab_det.set_gamma(model, 0.0)
    return slab_det.fuse(model, inplace=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=100)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    found = {}
    for config, size in CASES:
        models = {
            'LayerNorm': build(config, 'LN'),
            'fused, tokens by channel': build(config, 'PRepBN'),
            'fused': build(config, 'PRepBN'),
        }
        # As the released code leaves them.
        models['fused, tokens by channel'].backbone.released_order = True
        results = measure_latency(
            models,
            size,
            args.rounds,
            scope='backbone+neck',
            device=args.device,
            threads=args.threads,
            progress=True,
            keep_memory=args.device == 'cpu',
        )
        case = f'{Path(config).stem} {size[0]}x{size[1]}'
        print(case, latency_table(list(results.values())), sep='\n')
        found[case] = {name: result.to_dict() for name, result in results.items()}
    path = args.out or ROOT / f'benchmarks/results/token_layout_{args.device.replace(":", "")}.json'
    path.write_text(json.dumps(found, indent=1) + '\n')
    print(f'Written to {path}')


if __name__ == '__main__':
    main()
