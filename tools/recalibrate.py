"""Recalibrates a checkpoint: see slab_det/cli/recalibrate.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('recalibrate')
