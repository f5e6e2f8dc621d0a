"""Makes a table and pictures of report.json files: see slab_det/cli/report.py."""

from slab_det.cli.report import main

if __name__ == '__main__':
    main()
