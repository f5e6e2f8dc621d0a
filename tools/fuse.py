"""Fuses a trained detector: see slab_det/cli/fuse.py."""

from slab_det.cli.fuse import main

if __name__ == '__main__':
    main()
