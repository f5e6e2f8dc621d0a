"""Merges report.json files into a table and a picture: see slab_det/cli/report.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('report')
