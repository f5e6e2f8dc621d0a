"""Turns report.json files into one Markdown table and pictures: AP over latency, AP and gamma over trainings."""

import argparse

from slab_det.cli import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('reports', nargs='+', metavar='REPORT.json', help='later files win where they overlap')
    parser.add_argument('--out', required=True, metavar='DIR', help='folder for table.md and pictures')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Writes table.md and the pictures of ``args.reports`` to ``args.out``."""
    import os
    from pathlib import Path

    from slab_det.measure.figure import ap_latency_figure, read_scalars, save_figure, training_figure
    from slab_det.measure.report import markdown_table, merge_entries, read_report
    from slab_det.runtime.errors import ReportError

    entries = merge_entries(entry for path in args.reports for entry in read_report(path))
    if not entries:
        raise ReportError(f'no entries in {", ".join(args.reports)}; slab-det train, test and latency write them')
    table = markdown_table(entries)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / 'table.md').write_text(table)
    print(table)
    # A training logs beside its report.
    folders = [Path(path).resolve().parent for path in args.reports]
    root = os.path.commonpath([folder.parent for folder in folders])
    # Names that differ: every run may have a folder seed0.
    names = {str(folder.relative_to(root)): folder for folder in folders}
    runs = {name: scalars for name, folder in names.items() if (scalars := read_scalars(folder))}
    if runs:
        save_figure(training_figure(runs), out / 'training.svg')
    # Last: it raises if no entry has a latency.
    save_figure(ap_latency_figure(entries), out / 'ap_latency.svg')
    print(f'Table and pictures written to {out}')
