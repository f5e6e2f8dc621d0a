"""Absorbs the LayerNorms of a trained detector: see slab_det/cli/absorb.py."""

from slab_det.cli.absorb import main

if __name__ == '__main__':
    main()
