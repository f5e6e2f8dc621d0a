"""Merges reports into one Markdown table and one picture of AP over latency."""

import argparse

from slab_det.cli import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('reports', nargs='+', metavar='REPORT.json', help='reports; later files replace earlier values')
    parser.add_argument('--out', required=True, metavar='DIR', help='folder for table.md and ap_latency.svg')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Writes the table and the picture of ``args.reports`` to ``args.out``."""
    from pathlib import Path

    from slab_det.common.errors import SlabDetError
    from slab_det.common.own_files import OwnFiles
    from slab_det.measure.figure import ap_latency_figure, save_figure
    from slab_det.measure.report_file import markdown_table, merge_entries, read_report

    entries = merge_entries(entry for path in args.reports for entry in read_report(path))
    if not entries:
        raise SlabDetError(f'no entries in {", ".join(args.reports)}; slab-det train, test and latency write them')
    table = markdown_table(entries)
    files = OwnFiles(Path(args.out), 'report')
    with files.write('table.md') as path:
        path.write_text(table)
    print(table)
    figure = ap_latency_figure(entries)
    with files.write('ap_latency.svg') as path:
        save_figure(figure, path, 'svg')
    print(f'Table and picture written to {args.out}')


if __name__ == '__main__':
    main()
