"""Evaluates a detector: see slab_det/cli/test.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('test')
