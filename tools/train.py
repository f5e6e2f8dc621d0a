"""Trains, recalibrates and fuses a detector: see slab_det/cli/train.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('train')
