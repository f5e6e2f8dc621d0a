"""Merges report.json files into a table and a picture: see slab_det/cli/report.py."""

from slab_det.cli.report import main

if __name__ == '__main__':
    main()
