"""Evaluates an exported detector as slab-det test does, with the flags --precision and --json of earlier versions."""

import argparse

from slab_det.cli import command, test
from slab_det.precisions import EXPORT_RUNTIMES

# The precision of each value of --precision.
PRECISIONS = {'f32': 'float32', 'bf16': 'bfloat16'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    test.add_arguments(parser)
    parser.add_argument('--precision', choices=PRECISIONS, default='f32', help='as --dtype')
    parser.add_argument('--json', metavar='FILE', help='write AP, dataset and versions to FILE')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Evaluates ``args.checkpoint`` and writes ``args.json``."""
    from slab_det.common.files import check_writable
    from slab_det.common.record import write_record

    check_writable(args.json)
    args.runtime = args.runtime or EXPORT_RUNTIMES[0]
    args.dtype = PRECISIONS[args.precision]
    entry = test.test_detector(args)
    if args.json and entry:
        measured = dict(config=entry.config, file=entry.checkpoint, runtime=args.runtime, precision=args.precision)
        measured |= dict(dataset=entry.dataset, ap=entry.ap or {}, environment=entry.environment)
        write_record(args.json, measured)


if __name__ == '__main__':
    main()
