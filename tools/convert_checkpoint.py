"""Converts the checkpoint of a LayerNorm detector, or pretrained weights: see slab_det/cli/convert_checkpoint.py."""

from slab_det.cli.convert_checkpoint import main

if __name__ == '__main__':
    main()
