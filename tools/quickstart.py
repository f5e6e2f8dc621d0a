"""Trains, fuses and compares small detectors on generated images: see slab_det/cli/quickstart.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('quickstart')
