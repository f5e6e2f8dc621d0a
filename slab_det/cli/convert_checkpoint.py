"""Converts pretrained weights of a backbone to mmdet's layout. A config reads the result by
init_cfg=dict(type='Pretrained', checkpoint=FILE.pth)."""

import argparse

from slab_det.cli import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', help='backbone weights or timm://NAME')
    parser.add_argument('destination', metavar='FILE.pth', help='output')
    parser.add_argument('--config', required=True, help='any config with the backbone')
    # Scripts name the layout since there were two. The other one, prepbn, stays an error.
    parser.add_argument('--to', choices=('native',), help=argparse.SUPPRESS)


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Converts ``args.source`` and writes it to ``args.destination``."""
    from slab_det.checkpoints.build import rewrite_as_native
    from slab_det.cli.config import check_out, read_config

    cfg = read_config(args.config)
    check_out(args.destination, args.source)
    # The loader logs its report.
    rewrite_as_native(cfg, args.source, args.destination)
    print(f'Written to {args.destination}')


if __name__ == '__main__':
    main()
