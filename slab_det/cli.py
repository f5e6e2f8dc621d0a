"""What the command lines share: the config that their arguments make, the runner, and errors as one line."""

import argparse
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.hub import get_config
from mmengine.logging import MMLogger
from mmengine.registry import OPTIMIZERS, RUNNERS
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from slab_det import runtime
from slab_det.data import check_data, check_num_classes, set_data_root
from slab_det.hooks import NormStateHook
from slab_det.recalibration import image_folder_dataloader, recalibration_dataloader
from slab_det.runtime.errors import CheckpointError, ConfigError, SlabDetError, config_errors, describe_error
from slab_det.runtime.run_folder import check_writable

CONFIG_SUFFIXES = ('.py', '.json', '.yaml', '.yml')
# Launcher: the variable that it sets for every process, and the command to start it with.
LAUNCHERS = {
    'pytorch': ('RANK', 'torchrun or tools/dist_train.sh'),
    'slurm': ('SLURM_PROCID', 'srun'),
    'mpi': ('OMPI_COMM_WORLD_RANK', 'mpirun'),
}
# What mmengine's runner reads at the top of a config.
RUNNER_SETTINGS = {
    *inspect.signature(Runner).parameters,
    *('activation_checkpointing', 'auto_scale_lr', 'compile', 'efficient_conv_bn_eval', 'find_unused_parameters'),
    *('model_wrapper_cfg', 'runner_type', 'sync_bn', 'tta_model', 'tta_pipeline'),
}
# How the messages begin, of hundreds of lines together, that mmengine logs before the first iteration.
PREAMBLE = (
    f'\n{"-" * 60}\nSystem environment:',
    'Config:\n',
    'Hooks will be executed in the following order:\n',
    'paramwise_options -- ',
)


def run_cli(main: Callable[..., None], *args: argparse.Namespace) -> None:
    """Installs the runtime and calls ``main``; an expected error becomes ``error: …`` on stderr and exit code 1."""
    runtime.install()
    try:
        main(*args)
    except (SlabDetError, OSError) as error:
        print(f'error: {describe_error(error, any(hasattr(arg, "resume") for arg in args))}', file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        # As a shell says it of a program that Ctrl-C ended.
        raise SystemExit(130) from None


def read_config(path: str, options: dict | None = None, data_root: str | None = None) -> Config:
    """Reads the config of a detector.

    Args:
        path: A .py, .json or .yaml file, or one of an installed package, such as ``slab_det::slab/NAME.py``.
        options: What ``--cfg-options`` parsed.
        data_root: Where every dataset of the config shall be read, see :func:`slab_det.data.set_data_root`.

    Raises:
        ConfigError: If it is no config, or has no model.
        DataError: If ``data_root`` is no folder.
    """
    if not path.endswith(CONFIG_SUFFIXES):
        raise ConfigError(f'{path} is no config: its name does not end in {", ".join(CONFIG_SUFFIXES)}')
    with config_errors(path):
        cfg = get_config(path) if '::' in path else Config.fromfile(path)
        cfg.merge_from_dict(options or {})
    if not isinstance(cfg.get('model'), dict) or 'type' not in cfg.model:
        raise ConfigError(f'{path} is no config of a detector: it has no model=dict(type=...)')
    if data_root is not None:
        set_data_root(cfg, data_root)
    return cfg


def read_images(cfg: Config, num_images: int, pipeline: str = 'test', folder: str | None = None) -> DataLoader:
    """The pictures of ``folder``, or else training images of the config.

    Raises:
        DataError: If there are none, or files are missing.
    """
    if folder is not None:
        return image_folder_dataloader(cfg, folder, num_images)
    check_data(cfg, ('train',))
    return recalibration_dataloader(cfg, num_images, pipeline)


def check_out(out: str, checkpoint: str, config: str | None = None) -> None:
    """Refuses to overwrite the checkpoint of a training, which holds more than its weights, or its config.

    Raises:
        CheckpointError: If ``out`` is a folder or the checkpoint, or ``config`` is one that goes beside ``out``.
        OSError: If ``out`` cannot be written.
    """
    path = Path(out)
    if path.is_dir() or path.resolve() == Path(checkpoint).resolve():
        raise CheckpointError(f'{out} is a folder or the checkpoint itself; give another file')
    for beside in (path.with_name(f'{path.stem}{kind}_config.py') for kind in ('', '_tune')):
        if config is not None and beside.resolve() == Path(config).resolve():
            raise CheckpointError(f'{out} would put a new config in the place of {config}; give another file')
    check_writable(out)


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Reads ``args.config`` and applies what ``add_runner_arguments`` parsed; the command line wins.

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
    cfg = read_config(args.config, args.cfg_options, args.data_root)
    for name in sorted({option.partition('.')[0] for option in args.cfg_options or ()} - RUNNER_SETTINGS):
        # A typo, or a variable, which was copied to where it counts when the file was parsed.
        print(f'--cfg-options {name}: mmengine reads no setting of this name; give those made of it', file=sys.stderr)
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return cfg


class ToolRunner(Runner):
    """A runner that leaves the config in its folder alone: a test must not replace that of the training."""

    def dump_config(self) -> None:
        """Nothing; :func:`build_training` writes that of a training."""


class QuietRunner(ToolRunner):
    """A runner that writes what is alike in every run to its log file alone, not to the screen."""

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """mmengine's logger, whose first handler is the screen."""
        logger = super().build_logger(*args, **kwargs)
        logger.handlers[0].addFilter(
            lambda record: record.levelno > logging.INFO or not record.getMessage().startswith(PREAMBLE)
        )
        logger.info(f'Environment, config, hooks and options of each parameter: {logger.log_file}, or --verbose')
        return logger


def build_runner(cfg: Config, verbose: bool = False) -> Runner:
    """The runner that a config asks for, with the loops that it will run.

    Args:
        cfg: The config.
        verbose: The screen gets all that the log file gets.

    Raises:
        ConfigError: If it cannot be built.
    """
    with config_errors(cfg.filename):
        if 'runner_type' not in cfg:
            return (ToolRunner if verbose else QuietRunner).from_cfg(cfg)
        if not issubclass(RUNNERS.get(cfg.runner_type) or Runner, Runner):
            raise ConfigError(f"runner_type='{cfg.runner_type}' is no subclass of mmengine's Runner; leave it out")
        return RUNNERS.build(cfg)


def build_training(runner: Runner) -> None:
    """Builds what ``runner.train()`` would build first: what is wrong with a config comes out here.

    The config, as it runs, goes into the run's folder.

    Raises:
        ConfigError: If data, loops or optimizer cannot be built.
        DataError: If heads have another number of classes than the data.
    """
    with config_errors(runner.cfg.filename):
        optimizer = ((runner.cfg.get('optim_wrapper') or {}).get('optimizer') or {}).get('type')
        if isinstance(optimizer, str) and OPTIMIZERS.get(optimizer) is None:
            # mmengine's own error says that None cannot be called.
            raise KeyError(f'{optimizer} is not in the optimizer registry')
        for split, loop in (('train', runner.train_loop), ('val', runner.val_loop)):
            if loop is not None:
                check_num_classes(runner.model, loop.dataloader.dataset, split)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    # Configs that do not start from configs/_base_/runtime.py lack it, and with it the word on hooks that are missing.
    if not any(isinstance(hook, NormStateHook) for hook in runner.hooks):
        runner.register_hook(NormStateHook())
    Runner.dump_config(runner)


def build_test(runner: Runner) -> None:
    """Builds what ``runner.test()`` would build first: what is wrong with a config comes out here.

    Raises:
        ConfigError: If there is nothing to test on, or data or evaluator cannot be built.
    """
    with config_errors(runner.cfg.filename):
        if runner.test_loop is None:
            raise ConfigError(f'{runner.cfg.filename} has no test_dataloader, test_cfg and test_evaluator; add them')


def enable_test_time_augmentation(cfg: Config) -> None:
    """Wraps model and test pipeline of a config for TTA, in place; by flips where it has no tta_pipeline."""
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if 'tta_pipeline' not in cfg:
        *steps, pack = dataset.pipeline
        keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
        pack = {**pack, 'meta_keys': [*dict.fromkeys([*keys, *pack.get('meta_keys', ())])]}
        flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (1.0, 0.0)]
        cfg.tta_pipeline = [*steps, {'type': 'TestTimeAug', 'transforms': [flips, [pack]]}]
    if 'tta_model' not in cfg:
        nms = {'type': 'nms', 'iou_threshold': 0.5}
        cfg.tta_model = {'type': 'DetTTAModel', 'tta_cfg': {'nms': nms, 'max_per_img': 100}}
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def latency_options(args: argparse.Namespace) -> dict:
    """What ``add_latency_arguments`` parsed, as keyword arguments of ``measure_latency``."""
    names = ('rounds', 'warmup', 'scope', 'repeat', 'dtype', 'compile', 'threads', 'image', 'keep_memory')
    return {'size': args.size and tuple(args.size), 'cost': True, **{name: getattr(args, name) for name in names}}
