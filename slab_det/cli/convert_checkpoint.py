"""Converts a LayerNorm detector to PRepBN and writes a fine-tuning config. --to native converts pretrained weights of a
backbone to mmdet's layout instead."""

import argparse

from slab_det.cli import command, find_folder

SCHEDULE = find_folder('configs') / '_base_/schedules/finetune_prepbn.py'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', help='prepbn: checkpoint of the detector; native: backbone weights or timm://NAME')
    parser.add_argument(
        'destination', metavar='FILE.pth', help='output; prepbn also writes FILE_config.py, for the fine-tune'
    )
    parser.add_argument(
        '--to',
        choices=('prepbn', 'native'),
        default='prepbn',
        help="prepbn: a PRepBN detector; native: mmdet's layout of a backbone, for "
        "init_cfg=dict(type='Pretrained', checkpoint=FILE.pth) (default %(default)s)",
    )
    parser.add_argument('--config', required=True, help='config of the detector; native: any config with the backbone')
    parser.add_argument('--data-root', metavar='DIR', help='read every dataset of the config below DIR (prepbn)')
    parser.add_argument('--schedule', default=str(SCHEDULE), help='config of the fine-tune (prepbn; default: 3 epochs)')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Converts ``args.source`` and writes it to ``args.destination``."""
    from mmengine.config import Config

    from slab_det.checkpoints.build import rewrite_as_native
    from slab_det.cli.config import check_out, read_config
    from slab_det.conversion import convert_detector
    from slab_det.runtime.errors import config_errors

    cfg = read_config(args.config, data_root=args.data_root)
    if args.to == 'native':
        check_out(args.destination, args.source)
        # The loader logs its report.
        rewrite_as_native(cfg, args.source, args.destination)
        print(f'Written to {args.destination}')
        return
    check_out(args.destination, args.source, args.config)
    with config_errors(args.schedule):
        schedule = Config.fromfile(args.schedule)
    checkpoint, config, report = convert_detector(cfg, args.source, args.destination, schedule)
    print(f'{report}\nWritten to {checkpoint} and {config}\nFine-tune: slab-det train {config}')


if __name__ == '__main__':
    main()
