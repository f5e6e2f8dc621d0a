"""Recalibrates a checkpoint on so many training images and writes it, unfused, with the report of the recalibration.

    python benchmarks/norms/recalibrate.py CONFIG CHECKPOINT OUT.pth --num-images 100 --data-root data/bccd
"""
import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
from pathlib import Path

from mmengine.fileio import put_text
from mmengine.runner import save_checkpoint

from benchmarks.norms.drift import drift, statistics
from slab_det.cli import read_config, run_cli
from slab_det.datasets import set_data_root
from slab_det.datasets.recalibration import recalibration_dataloader
from slab_det.detectors import build_detector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('out', type=Path)
    parser.add_argument('--num-images', type=int, required=True)
    parser.add_argument('--data-root')
    args = parser.parse_args()
    cfg = read_config(args.config)
    if args.data_root:
        set_data_root(cfg, args.data_root)
    model = build_detector(cfg, args.checkpoint)
    before = statistics(model)
    report = slab_det.recalibrate(model, recalibration_dataloader(cfg, args.num_images))
    result = dict(**report.to_dict(), drift=drift(before, statistics(model)))
    save_checkpoint(dict(state_dict=model.state_dict()), str(args.out))
    put_text(json.dumps(result, indent=1) + '\n', str(args.out.with_name('recalibration.json')))


if __name__ == '__main__':
    run_cli(main)
