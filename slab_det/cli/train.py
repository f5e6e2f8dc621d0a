"""Trains, recalibrates and fuses a detector. Takes mmdet's arguments and --data-root."""

import argparse
import sys
from pathlib import Path

from slab_det.cli import command
from slab_det.cli.arguments import add_runner_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='training config')
    add_runner_arguments(parser)
    parser.add_argument('--amp', action='store_true', help='train with automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate to the batch size')
    optional = dict(nargs='?', const='auto', metavar='CHECKPOINT')
    parser.add_argument('--resume', **optional, help='resume from a checkpoint, by default the latest in the work dir')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Trains the detector of ``args.config``."""
    from mmdet.utils import setup_cache_size_limit_of_dynamo
    from mmengine.device import get_device
    from mmengine.dist import is_main_process
    from mmengine.logging import MMLogger

    from slab_det.cli.config import config_from_arguments, describe_old_keys
    from slab_det.cli.screen import build_runner
    from slab_det.common.config import type_name
    from slab_det.common.errors import ConfigError, SlabDetError, config_errors
    from slab_det.hooks import FiniteLossHook, NormStateHook
    from slab_det.preflight import check_data, check_num_classes
    from slab_det.runtime.run_folder import find_latest_checkpoint, write_config

    setup_cache_size_limit_of_dynamo()
    cfg = config_from_arguments(args)
    old_keys = describe_old_keys(cfg)
    if not cfg.get('train_dataloader'):
        remedy = 'if it is the config of a fused detector, train the unfused config and fuse again'
        raise ConfigError(
            f'{args.config} has no train_dataloader; '
            + (f'it is a config of mmdet 2, which mmdet 3 does not read: {old_keys}' if old_keys else remedy)
        )
    if old_keys:
        MMLogger.get_current_instance().warning(
            f'{args.config} has keys of mmdet 2, which mmdet 3 does not read, so they change nothing: {old_keys}'
        )
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    wrapper = (cfg.get('optim_wrapper') or {}).get('type') or ''
    if type_name(wrapper) == 'AmpOptimWrapper' and get_device() in ('cpu', 'mps'):
        remedy = 'leave out --amp' if args.amp else 'add --cfg-options optim_wrapper.type=OptimWrapper'
        raise SlabDetError(
            f'{args.config}: AmpOptimWrapper trains in mixed precision on a GPU, and PyTorch finds none; {remedy}'
        )
    if args.auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise SlabDetError(
                f'--auto-scale-lr: {args.config} has no auto_scale_lr.base_batch_size; leave the flag out, or set '
                'auto_scale_lr = dict(base_batch_size=N), where N is the batch size of the configured learning rate'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        checkpoint = find_latest_checkpoint(cfg.work_dir) if args.resume == 'auto' else args.resume
        cfg.resume = checkpoint is not None
        if cfg.resume:
            cfg.load_from = checkpoint
        else:
            # load_from stays: mmdet's --resume would clear it, and lose the pretrained weights.
            print(f'--resume: {cfg.work_dir} has no checkpoint yet, so this run starts from the beginning')
    check_data(cfg, ('train', 'val'))
    # Build everything here, so that errors name the config.
    with config_errors(cfg.filename):
        runner = build_runner(cfg, args.verbose)
        if is_main_process() and cfg.filename.endswith('.py'):
            # As the runner has written it, and read once: a config that cannot be read would be of no use.
            write_config(runner.cfg, Path(runner.work_dir) / Path(cfg.filename).name)
        for split, loop in (('train', runner.train_loop), ('val', runner.val_loop)):
            if loop is not None:
                check_num_classes(runner.model, loop.dataloader.dataset, split)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    # NormStateHook reports missing hooks. Configs that do not inherit configs/_base_/runtime.py lack both.
    for kind in (NormStateHook, FiniteLossHook):
        if not any(isinstance(hook, kind) for hook in runner.hooks):
            runner.register_hook(kind())
    try:
        runner.train()
    except KeyboardInterrupt:
        if is_main_process():
            latest = find_latest_checkpoint(cfg.work_dir)
            how = f'add --resume to the command to continue from {latest}' if latest else 'there is no checkpoint yet'
            print(f'Interrupted after {runner.iter} of {runner.max_iters} iterations: {how}', file=sys.stderr)
        raise


if __name__ == '__main__':
    main()
