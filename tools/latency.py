"""Measures latency: see slab_det/cli/latency.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('latency')
