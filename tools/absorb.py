"""Removes hidden channels and LayerNorms of a trained detector: see slab_det/cli/absorb.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('absorb')
