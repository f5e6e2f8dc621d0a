"""Trains, recalibrates and fuses a detector: see slab_det/cli/train.py."""

from slab_det.cli.train import main

if __name__ == '__main__':
    main()
