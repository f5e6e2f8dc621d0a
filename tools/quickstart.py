"""Trains a small detector on generated images, optimizes it, and trains another: see slab_det/cli/quickstart.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('quickstart')
