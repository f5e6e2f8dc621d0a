"""Finds the fastest form of a trained detector on this machine that loses little AP: in PyTorch, ONNX Runtime or
OpenVINO, in each precision, with and without channels and norms. Writes a folder that slab_det.load_detector serves."""

import argparse

from slab_det.cli import command
from slab_det.cli.arguments import ConfigOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config of the detector; also one of mmdet, such as mmdet::swin/NAME.py')
    parser.add_argument('checkpoint', help='its weights')
    parser.add_argument('--images', required=True, metavar='DIR', help='folder of images, without labels')
    parser.add_argument(
        '--out', required=True, metavar='DIR', help='new folder for the result; the same command goes on'
    )
    parser.add_argument('--minutes', type=float, default=20, help='no step begins after these (default %(default)s)')
    parser.add_argument(
        '--max-loss', type=float, default=0.5, metavar='AP', help='largest loss of AP, in points (default %(default)s)'
    )
    parser.add_argument('--eval', action='store_true', help="also measure AP, on the config's validation images")
    parser.add_argument('--num-images', type=int, default=120, help='number of images (default %(default)s)')
    parser.add_argument('--device', choices=('cpu', 'cuda'), help='(default: cuda where there is one)')
    parser.add_argument('--threads', type=int, metavar='N', help="CPU threads (default: torch's)")
    parser.add_argument('--data-root', metavar='DIR', help='root folder of all datasets of the config, for --eval')
    parser.add_argument('--cfg-options', nargs='+', action=ConfigOptions, metavar='KEY=VALUE')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Optimizes ``args.checkpoint`` into ``args.out``, and prints the table."""
    import slab_det
    from slab_det.cli.config import read_config
    from slab_det.common.memory import keep_freed_memory
    from slab_det.common.numbers import check_threads

    check_threads(args.threads)
    keep_freed_memory()
    cfg = read_config(args.config, args.cfg_options, args.data_root)
    names = ('minutes', 'max_loss', 'eval', 'num_images', 'device', 'threads')
    options = {name: getattr(args, name) for name in names}
    try:
        report = slab_det.optimize(cfg, args.checkpoint, args.images, args.out, **options)
    except (KeyboardInterrupt, SystemExit):
        print(f'\nInterrupted. {args.out} holds the best form after the last step; the same command goes on.')
        raise
    print(f'\n{report}\n\nWritten to {report.folder}: slab_det.load_detector({str(report.folder)!r}) serves it.')


if __name__ == '__main__':
    main()
