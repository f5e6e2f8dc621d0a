"""Evaluates a detector: see slab_det/cli/test.py."""

from slab_det.cli.test import main

if __name__ == '__main__':
    main()
