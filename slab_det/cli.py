"""What the command lines share: mmdet's arguments, the config they make, and errors as one line."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mmengine.config import Config, ConfigDict, DictAction
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from slab_det.datasets import set_data_root
from slab_det.errors import SlabDetError
from slab_det.latency import DTYPES, SCOPES


def run_cli(main: Callable[[], None]) -> None:
    """Calls ``main``; an expected error becomes ``error: …`` on stderr and exit code 1, not a traceback."""
    try:
        main()
    except (SlabDetError, FileNotFoundError) as error:
        print(f'error: {error}', file=sys.stderr)
        raise SystemExit(1) from error


def add_runner_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that mmdet's train.py and test.py have in common, and ``--data-root``."""
    parser.add_argument('--work-dir', help='folder for logs, checkpoints and report.json')
    parser.add_argument('--data-root', metavar='DIR', help='read every dataset of the config below DIR')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='override settings of the config; lists as key="[a,b]" or key=a,b, without spaces',
    )
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none', help='job launcher')
    # torchrun sets LOCAL_RANK; torch.distributed.launch passes the flag, spelled either way.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Reads ``args.config`` and applies what :func:`add_runner_arguments` parsed; the command line wins."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = Config.fromfile(args.config)
    cfg.launcher = args.launcher
    if args.cfg_options is not None:
        cfg.merge_from_dict(args.cfg_options)
    if args.data_root is not None:
        set_data_root(cfg, args.data_root)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def build_runner(cfg: Config) -> Runner:
    """The runner that a config asks for."""
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def enable_test_time_augmentation(cfg: Config) -> None:
    """Wraps model and test pipeline of a config for TTA, in place; by flips where it has no tta_pipeline."""
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if 'tta_pipeline' not in cfg:
        pack = {
            'type': 'PackDetInputs',
            'meta_keys': (
                'img_id',
                'img_path',
                'ori_shape',
                'img_shape',
                'scale_factor',
                'flip',
                'flip_direction',
            ),
        }
        flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (1.0, 0.0)]
        cfg.tta_pipeline = [
            *dataset.pipeline[:-1],
            {'type': 'TestTimeAug', 'transforms': [flips, [pack]]},
        ]
    if 'tta_model' not in cfg:
        nms = {'type': 'nms', 'iou_threshold': 0.5}
        cfg.tta_model = {'type': 'DetTTAModel', 'tta_cfg': {'nms': nms, 'max_per_img': 100}}
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :func:`slab_det.measure_latency`, besides the device."""
    group = parser.add_argument_group('latency')
    group.add_argument('--rounds', type=int, default=100, help='timed rounds (default %(default)s)')
    group.add_argument('--warmup', type=int, default=20, help='rounds before them (default %(default)s)')
    group.add_argument(
        '--size',
        type=int,
        nargs=2,
        default=(800, 1333),
        metavar=('H', 'W'),
        help='image size in pixels before padding (default 800 1333)',
    )
    group.add_argument('--scope', choices=list(SCOPES), default='detector', help='(default %(default)s)')
    group.add_argument('--dtype', choices=list(DTYPES), default='float32', help='float16, bfloat16: autocast')
    group.add_argument('--compile', action='store_true', help='torch.compile backbone and neck')
    group.add_argument('--threads', type=int, metavar='N', help="CPU threads (default: torch's)")
    group.add_argument('--image', metavar='FILE', help='photograph to run on')


def latency_options(args: argparse.Namespace) -> dict:
    """What :func:`add_latency_arguments` parsed, as keyword arguments of ``measure_latency``."""
    names = ('rounds', 'warmup', 'scope', 'dtype', 'compile', 'threads', 'image')
    return {'size': tuple(args.size), **{name: getattr(args, name) for name in names}}
