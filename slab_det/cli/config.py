"""Reads configs and images for the commands, and checks their output paths."""

import argparse
import os
from pathlib import Path

from mmengine.config import Config
from mmengine.hub import get_config
from torch.utils.data import DataLoader

from slab_det.common.config import to_values
from slab_det.common.errors import CheckpointError, ConfigError, config_errors
from slab_det.common.files import check_writable
from slab_det.preflight import check_data, set_data_root
from slab_det.recalibration import image_folder_dataloader, recalibration_dataloader

# What a config of mmdet 2 says, which mmdet 3 does not read, and what says it now.
SUCCESSORS = dict(
    data='train_dataloader, val_dataloader and test_dataloader',
    optimizer='optim_wrapper=dict(optimizer=…)',
    optimizer_config='optim_wrapper=dict(clip_grad=…)',
    lr_config='param_scheduler',
    runner='train_cfg=dict(max_epochs=…)',
    total_epochs='train_cfg=dict(max_epochs=…)',
    evaluation='val_evaluator=dict(metric=…) and train_cfg=dict(val_interval=…)',
    checkpoint_config='default_hooks=dict(checkpoint=…)',
    log_config='default_hooks=dict(logger=…) and visualizer',
    workflow='train_cfg and val_cfg',
)


def describe_old_keys(cfg: Config) -> str:
    """The keys of a config that only mmdet 2 read, each with its successor; '' if there are none."""
    # Configs of mmdet 3 may hold an optimizer as a variable, which their optim_wrapper names.
    found = [key for key in SUCCESSORS if key in cfg and not (key == 'optimizer' and cfg.get('optim_wrapper'))]
    return '; '.join(f'{key} is now {SUCCESSORS[key]}' for key in found)


def read_config(path: str, options: dict | None = None, data_root: str | None = None) -> Config:
    """Reads the config of a detector.

    Args:
        path: A .py, .json or .yaml file, or a config of an installed package, such as ``slab_det::slab/NAME.py``.
        options: The parsed ``--cfg-options``.
        data_root: See :func:`slab_det.preflight.set_data_root`.

    Raises:
        ConfigError: If the file cannot be read as a config, or has no model.
        DataError: If ``data_root`` is not a folder.
    """
    if not path.endswith(('.py', '.json', '.yaml', '.yml')):
        raise ConfigError(f'{path} is not a config: its name does not end in .py, .json, .yaml or .yml')
    with config_errors(path):
        cfg = get_config(path) if '::' in path else Config.fromfile(path)
        cfg.merge_from_dict(options or {})
        # From here on a Python-style config is as any other: whatever is written of it has names that can be read.
        cfg = Config(to_values(cfg), filename=cfg.filename)
    if not isinstance(cfg.get('model'), dict) or 'type' not in cfg.model:
        raise ConfigError(f'{path} is not the config of a detector: it has no model=dict(type=...)')
    if data_root is not None:
        set_data_root(cfg, data_root)
    return cfg


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Reads ``args.config`` and applies the arguments of ``add_runner_arguments``; raises as :func:`read_config`."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options, args.data_root)
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def image_loader(cfg: Config, num_images: int, pipeline: str = 'test', folder: str | None = None) -> DataLoader:
    """Returns a loader of the images in ``folder``, or of training images of the config if ``folder`` is None.

    Raises:
        DataError: If there are no images, or files are missing.
    """
    if folder is not None:
        return image_folder_dataloader(cfg, folder, num_images)
    check_data(cfg, ('train',))
    return recalibration_dataloader(cfg, num_images, pipeline)


def check_report(path: str | Path | None) -> None:
    """Raises an error, before a measurement, if the report at ``path`` cannot be updated; None means no report."""
    from slab_det.measure.report_file import read_report

    check_writable(path)
    if path is not None and Path(path).exists():
        read_report(path)


def check_out(out: str, checkpoint: str, config: str | None = None) -> None:
    """Refuses an output path that would overwrite the input checkpoint or its config.

    Raises:
        CheckpointError: If ``out`` is ``checkpoint``, or the config written beside ``out`` would overwrite ``config``.
        OSError: If ``out`` cannot be written.
    """
    path = Path(out)
    if path.resolve() == Path(checkpoint).resolve():
        raise CheckpointError(f'{out} is the input checkpoint; give another file')
    beside = [path.with_name(f'{path.stem}{suffix}.py').resolve() for suffix in ('_config', '_tune_config')]
    if config is not None and Path(config).resolve() in beside:
        raise CheckpointError(f'the config written beside {out} would overwrite {config}; give another file')
    check_writable(out)
