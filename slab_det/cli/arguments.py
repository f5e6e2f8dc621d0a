"""Arguments that several commands take."""

import argparse
from typing import Any

from slab_det.measure import SCOPES
from slab_det.precisions import precisions_of


class ConfigOptions(argparse.Action):
    """Parses KEY=VALUE as mmengine's DictAction does, and reports other words as a usage error."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: list[str], *args: Any) -> None:
        from mmengine.config import DictAction

        try:
            DictAction(self.option_strings, self.dest)(parser, namespace, values)
        except (ValueError, AssertionError) as error:
            raise argparse.ArgumentError(self, f'{" ".join(values)}: give KEY=VALUE, lists as key="[a,b]"') from error


def add_runner_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--data-root`` and the arguments that mmdet's train.py and test.py have in common."""
    parser.add_argument('--work-dir', help='folder for logs, checkpoints and report.json')
    parser.add_argument('--data-root', metavar='DIR', help='read every dataset of the config below DIR')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=ConfigOptions,
        metavar='KEY=VALUE',
        help='override settings of the config; lists as key="[a,b]" or key=a,b, without spaces',
    )
    parser.add_argument('--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none', help='job launcher')
    parser.add_argument('--verbose', action='store_true', help='show on the screen all that the log file gets')
    # torch.distributed.launch passes one of these flags; torchrun sets LOCAL_RANK instead.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def add_latency_arguments(parser: argparse.ArgumentParser, size: tuple[int, int] | None = None) -> None:
    """Adds the options of :func:`slab_det.measure_latency` except the device; ``size`` is the default of ``--size``."""
    group = parser.add_argument_group('latency')
    group.add_argument('--rounds', type=int, default=100, help='timed rounds (default %(default)s)')
    group.add_argument('--warmup', type=int, default=20, help='untimed rounds before these (default %(default)s)')
    group.add_argument(
        '--size',
        type=int,
        nargs=2,
        default=size,
        metavar=('H', 'W'),
        help=f'image size in pixels before padding (default: {size or "the size of the first test image"})',
    )
    group.add_argument('--scope', choices=SCOPES, default='detector', help='timed part (default %(default)s)')
    group.add_argument(
        '--dtype',
        choices=precisions_of('eager'),
        default='float32',
        help='of the layers: by autocast, or with --deploy and of exported files by that precision',
    )
    group.add_argument('--threads', type=int, metavar='N', help="CPU threads (default: torch's)")
    group.add_argument('--image', metavar='FILE', help='input image')


def check_latency_options(args: argparse.Namespace) -> None:
    """Raises SlabDetError for arguments of ``add_latency_arguments`` that no machine can measure."""
    from slab_det.common.numbers import check_size, check_threads
    from slab_det.measure.latency import check_rounds

    check_rounds(args.rounds, args.warmup)
    if args.size is not None:
        check_size(args.size)
    check_threads(args.threads)


def latency_options(args: argparse.Namespace) -> dict:
    """Returns the arguments of ``add_latency_arguments`` as keyword arguments of ``measure_latency``."""
    names = ('rounds', 'warmup', 'size', 'scope', 'dtype', 'threads', 'image')
    return {'cost': True, 'progress': True, **{name: getattr(args, name) for name in names}}
