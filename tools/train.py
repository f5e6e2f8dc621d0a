"""Trains, recalibrates and fuses a detector. mmdet's arguments, and --data-root."""

import argparse
import os
import sys

from slab_det_arguments import add_runner_arguments


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the run')
    add_runner_arguments(parser)
    parser.add_argument('--amp', action='store_true', help='train with automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate to the batch size')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from a checkpoint; without a path from the latest in the work dir',
    )
    return parser.parse_args()


if __name__ == '__main__':
    # Before the imports that take seconds.
    args = parse_arguments()

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

from mmdet.utils import setup_cache_size_limit_of_dynamo
from mmengine.config import Config
from mmengine.dist import is_main_process

from slab_det.cli import LAUNCHERS, build_runner, build_training, config_from_arguments, run_cli
from slab_det.data import check_data
from slab_det.runtime.errors import ConfigError, SlabDetError
from slab_det.runtime.run_folder import find_latest_checkpoint, lock_run_folder, remove_unfinished_files


def apply_training_arguments(cfg: Config, args: argparse.Namespace) -> None:
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise SlabDetError(f'--auto-scale-lr: {args.config} has no auto_scale_lr.base_batch_size')
        cfg.auto_scale_lr.enable = True
    if args.resume == 'auto':
        latest = find_latest_checkpoint(cfg.work_dir)
        cfg.resume = latest is not None
        if cfg.resume:
            cfg.load_from = latest
        else:
            # Where the config has a load_from, mmengine would start without it.
            print(f'--resume: {cfg.work_dir} has no checkpoint yet, so this run starts from the beginning')
    elif args.resume is not None:
        cfg.resume = True
        cfg.load_from = args.resume


def main(args: argparse.Namespace) -> None:
    setup_cache_size_limit_of_dynamo()
    cfg = config_from_arguments(args)
    if not cfg.get('train_dataloader'):
        raise ConfigError(
            f'{args.config} has no train_dataloader, so there is nothing to train on; of a fused detector, train the '
            'config that it was fused from, and fuse again'
        )
    apply_training_arguments(cfg, args)
    check_data(cfg, ('train', 'val'))
    # The runner, which numbers the processes, writes to the folder when it is built.
    if args.launcher == 'none' or os.environ[LAUNCHERS[args.launcher][0]] == '0':
        lock_run_folder(cfg.work_dir)
        remove_unfinished_files(cfg.work_dir)
    runner = build_runner(cfg, args.verbose)
    build_training(runner)
    try:
        runner.train()
    except KeyboardInterrupt:
        if is_main_process():
            latest = find_latest_checkpoint(cfg.work_dir)
            how = f'the same command with --resume goes on from {latest}' if latest else 'there is no checkpoint yet'
            print(f'Interrupted after {runner.iter} of {runner.max_iters} iterations: {how}', file=sys.stderr)
        raise


if __name__ == '__main__':
    run_cli(main, args)
