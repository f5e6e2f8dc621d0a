"""Recalibrates a checkpoint: see slab_det/cli/recalibrate.py."""

from slab_det.cli.recalibrate import main

if __name__ == '__main__':
    main()
