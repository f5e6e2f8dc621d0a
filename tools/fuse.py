"""Fuses a trained detector: writes a checkpoint without norms, and the config that loads it."""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse

from mmengine.config import Config

from slab_det.cli import run_cli
from slab_det.detectors import build_detector
from slab_det.fusion import save_fused


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config that the detector was trained with')
    parser.add_argument('checkpoint', help='its last checkpoint, recalibrated, gamma = 0')
    parser.add_argument('--out', required=True, metavar='FILE.pth', help='FILE_config.py is written beside it')
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    cfg = Config.fromfile(args.config)
    model = build_detector(cfg, args.checkpoint)
    fused = slab_det.fuse(model, inplace=True)
    checkpoint, config = save_fused(fused, cfg, args.out, model.dataset_meta)
    print(f'{fused.fusion_report}\nWritten to {checkpoint} and {config}')


if __name__ == '__main__':
    run_cli(main)
