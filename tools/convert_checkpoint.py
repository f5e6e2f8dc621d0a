"""Converts pretrained weights of a backbone: see slab_det/cli/convert_checkpoint.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('convert_checkpoint')
