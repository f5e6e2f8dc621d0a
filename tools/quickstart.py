"""Trains, fuses and compares small detectors on generated images: see slab_det/cli/quickstart.py."""

from slab_det.cli.quickstart import main

if __name__ == '__main__':
    main()
