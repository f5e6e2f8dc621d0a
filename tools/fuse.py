"""Fuses a trained detector: see slab_det/cli/fuse.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('fuse')
