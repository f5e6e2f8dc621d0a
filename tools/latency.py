"""Measures latency: see slab_det/cli/latency.py."""

from slab_det.cli.latency import main

if __name__ == '__main__':
    main()
