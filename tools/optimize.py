"""Finds the fastest form of a detector: see slab_det/cli/optimize.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('optimize')
