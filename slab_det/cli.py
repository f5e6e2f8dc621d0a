"""What the command lines share: mmdet's arguments, the config they make, and errors as one line."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mmengine.config import Config, ConfigDict, DictAction
from mmengine.registry import OPTIMIZERS, RUNNERS
from mmengine.runner import Runner

from slab_det import runtime
from slab_det.data import set_data_root
from slab_det.measure.latency import COMPILE_MODES, DTYPES, SCOPES
from slab_det.runtime.errors import ConfigError, SlabDetError, config_errors, describe_os_error

CONFIG_SUFFIXES = ('.py', '.json', '.yaml', '.yml')
# Launcher: the variable that it sets for every process, and the command to start it with.
LAUNCHERS = {
    'pytorch': ('RANK', 'torchrun or tools/dist_train.sh'),
    'slurm': ('SLURM_PROCID', 'srun'),
    'mpi': ('OMPI_COMM_WORLD_LOCAL_RANK', 'mpirun'),
}


def run_cli(main: Callable[[], None]) -> None:
    """Installs the runtime and calls ``main``; an expected error becomes ``error: …`` on stderr and exit code 1."""
    runtime.install()
    try:
        main()
    except (SlabDetError, OSError) as error:
        print(f'error: {error if isinstance(error, SlabDetError) else describe_os_error(error)}', file=sys.stderr)
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
    parser.add_argument('--launcher', choices=['none', *LAUNCHERS], default='none', help='job launcher')
    # torchrun sets LOCAL_RANK; torch.distributed.launch passes the flag, spelled either way.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def read_config(path: str, options: dict | None = None) -> Config:
    """Reads the config of a detector.

    Args:
        path: A .py, .json or .yaml file.
        options: What ``--cfg-options`` parsed.

    Raises:
        ConfigError: If it is no config, or has no model.
    """
    if not path.endswith(CONFIG_SUFFIXES):
        raise ConfigError(f'{path} is no config: its name does not end in {", ".join(CONFIG_SUFFIXES)}')
    with config_errors(path):
        cfg = Config.fromfile(path)
        cfg.merge_from_dict(options or {})
    if not isinstance(cfg.get('model'), dict) or 'type' not in cfg.model:
        raise ConfigError(f'{path} is no config of a detector: it has no model=dict(type=...)')
    return cfg


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Reads ``args.config`` and applies what :func:`add_runner_arguments` parsed; the command line wins.

    Raises:
        ConfigError: If it is no config of a detector.
        SlabDetError: If a launcher is named that has not launched this process.
    """
    variable, command = LAUNCHERS.get(args.launcher, (None, None))
    if variable is not None and variable not in os.environ:
        raise SlabDetError(
            f'--launcher {args.launcher}: {variable} is not set, so nothing launched this process; start it with '
            f'{command}, or leave the flag out for one process'
        )
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    if args.data_root is not None:
        set_data_root(cfg, args.data_root)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def build_runner(cfg: Config) -> Runner:
    """The runner that a config asks for, with the loops that it will run.

    Raises:
        ConfigError: If it cannot be built.
    """
    with config_errors(cfg.filename):
        return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def build_training(runner: Runner) -> None:
    """Builds what ``runner.train()`` would build first: what is wrong with a config comes out here.

    Raises:
        ConfigError: If data, loops or optimizer cannot be built.
    """
    with config_errors(runner.cfg.filename):
        optimizer = ((runner.cfg.get('optim_wrapper') or {}).get('optimizer') or {}).get('type')
        if isinstance(optimizer, str) and OPTIMIZERS.get(optimizer) is None:
            # mmengine's own error says that None cannot be called.
            raise KeyError(f'{optimizer} is not in the optimizer registry')
        _ = runner.train_loop, runner.val_loop
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)


def enable_test_time_augmentation(cfg: Config) -> None:
    """Wraps model and test pipeline of a config for TTA, in place; by flips where it has no tta_pipeline."""
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if 'tta_pipeline' not in cfg:
        meta_keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
        pack = {'type': 'PackDetInputs', 'meta_keys': meta_keys}
        flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (1.0, 0.0)]
        cfg.tta_pipeline = [*dataset.pipeline[:-1], {'type': 'TestTimeAug', 'transforms': [flips, [pack]]}]
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
    group.add_argument('--repeat', type=int, default=1, metavar='N', help='whole measurements: spread of their medians')
    group.add_argument('--dtype', choices=list(DTYPES), default='float32', help='float16, bfloat16: autocast')
    group.add_argument(
        '--compile',
        nargs='?',
        const='default',
        default=False,
        choices=COMPILE_MODES,
        metavar='MODE',
        help=f'torch.compile backbone and neck, in one of the modes {", ".join(COMPILE_MODES)}; not before a CONFIG',
    )
    group.add_argument('--threads', type=int, metavar='N', help="CPU threads (default: torch's)")
    group.add_argument(
        '--keep-memory', action='store_true', help='no fresh pages of memory between layers, as on servers; with glibc'
    )
    group.add_argument('--image', metavar='FILE', help='photograph to run on')


def latency_options(args: argparse.Namespace) -> dict:
    """What :func:`add_latency_arguments` parsed, as keyword arguments of ``measure_latency``."""
    names = ('rounds', 'warmup', 'scope', 'repeat', 'dtype', 'compile', 'threads', 'image', 'keep_memory')
    return {'size': tuple(args.size), 'cost': True, **{name: getattr(args, name) for name in names}}
