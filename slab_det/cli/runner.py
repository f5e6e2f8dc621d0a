"""Tests a checkpoint with mmengine's Runner, optionally fused, deployed or with test-time augmentation."""

import argparse

import torch
from mmdet.engine.hooks.utils import trigger_visualization_hook
from mmdet.evaluation import DumpDetResults
from mmengine.config import Config, ConfigDict
from mmengine.runner import Runner

import slab_det
from slab_det.cli.screen import build_runner
from slab_det.common.config import type_name, walk_datasets
from slab_det.common.distributed import unwrap
from slab_det.common.errors import ConfigError, SlabDetError, config_errors
from slab_det.common.pipeline import find_test_pipeline
from slab_det.compare.kernels import warn_of_precision
from slab_det.families.half_precision import autocast_forward
from slab_det.hooks import CheckedLoadHook
from slab_det.preflight import check_class_order, check_num_classes, classes_of_meta


class ReadOnly:
    """Mixin for a runner that writes no config, so that a test does not overwrite the training config."""

    def dump_config(self) -> None:
        """Writes nothing."""


def build_test_runner(cfg: Config, verbose: bool) -> Runner:
    """Builds the runner and its test loop, so that errors in the config are raised before the test.

    Args:
        cfg: A config with a test loop.
        verbose: See :func:`slab_det.cli.screen.build_runner`.

    Raises:
        ConfigError: If the config has no test loop, or its model, data or evaluator cannot be built.
    """
    with config_errors(cfg.filename):
        runner = build_runner(cfg, verbose, ReadOnly)
        if runner.test_loop is None:
            raise ConfigError(f'{cfg.filename} has no test_dataloader, test_cfg and test_evaluator; add them')
    return runner


def use_exported(cfg: Config, file: str, **options: object) -> None:
    """Makes the model of a config an exported file, in place.

    Args:
        cfg: The config of the detector that was exported.
        file: The file.
        **options: Options of :func:`slab_det.export.load_runtime`.
    """
    # Registers ExportedDetector; the import takes half a second, which other tests do not need.
    from slab_det.export.settings import detector_settings

    steps, detector = find_test_pipeline(cfg), detector_settings(cfg)
    cfg.model = dict(type='ExportedDetector', file=file, pipeline=steps, detector=detector, **options)
    # The file holds its own weights, and training hooks would find no layers in it.
    cfg.custom_hooks, cfg.load_from, cfg.resume = [], None, False
    # The runner would pass data_preprocessor to ExportedDetector, which preprocesses in the file.
    cfg.pop('data_preprocessor', None)


def run_test(cfg: Config, args: argparse.Namespace) -> tuple[Runner, dict]:
    """Tests ``args.checkpoint`` with the options of ``args``, and returns the runner and its metrics.

    Raises:
        ConfigError: See :func:`build_test_runner`.
        DataError: If the test dataset has other classes than the detector.
        SlabDetError: If ``--tta`` is given for a detector that predicts masks.
    """
    is_exported = type_name(cfg.model.type) == 'ExportedDetector'
    # The config that a resumed run wrote has resume=True.
    cfg.load_from, cfg.resume = None if is_exported else args.checkpoint, False
    if args.show or args.show_dir:
        trigger_visualization_hook(cfg, args)
    if args.tta:
        enable_test_time_augmentation(cfg)
    # The weights in the checkpoint are the averaged ones. EMAHook would replace them by its own copy, which is neither
    # recalibrated nor fused.
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks') or [] if type_name(hook.type) != 'EMAHook']
    runner = build_test_runner(cfg, args.verbose)
    # Configs that do not inherit configs/_base_/runtime.py lack it, and mmengine loads whatever fits.
    if not is_exported and not any(isinstance(hook, CheckedLoadHook) for hook in runner.hooks):
        runner.register_hook(CheckedLoadHook())
    if is_exported:
        check_class_order(cfg, 'test', classes_of_meta(runner.model.runtime.metadata) or (), args.checkpoint)
    else:
        check_num_classes(runner.model, runner.test_loop.dataloader.dataset, 'test')
    model, dtype = unwrap(runner.model), getattr(torch, args.dtype)
    if args.device:
        # The runner takes a GPU where there is one.
        model.to(args.device)
    if args.tta and getattr(model, 'with_mask', False):
        raise SlabDetError('--tta: mmdet merges boxes but not masks, and this detector predicts masks; leave out --tta')
    if args.fuse or args.deploy:
        runner.load_or_resume()
        model.eval()
    if args.fuse:
        slab_det.fuse(model, inplace=True)
    if args.deploy:
        slab_det.deploy(model, dtype, inplace=True)
    elif args.dtype != 'float32':
        warn_of_precision(model, dtype)
        autocast_forward(model, dtype)
    if args.out:
        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=args.out))
    return runner, runner.test()


def enable_test_time_augmentation(cfg: Config) -> None:
    """Sets up a config for test-time augmentation, in place; the default ``tta_pipeline`` flips images."""
    datasets = [dataset for dataset in walk_datasets(cfg.test_dataloader.dataset) if 'pipeline' in dataset]
    if 'tta_pipeline' not in cfg:
        *steps, pack = datasets[0].pipeline
        keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
        pack = {**pack, 'meta_keys': [*dict.fromkeys([*keys, *pack.get('meta_keys', ())])]}
        flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (1.0, 0.0)]
        cfg.tta_pipeline = [*steps, {'type': 'TestTimeAug', 'transforms': [flips, [pack]]}]
    if 'tta_model' not in cfg:
        nms = {'type': 'nms', 'iou_threshold': 0.5}
        cfg.tta_model = {'type': 'DetTTAModel', 'tta_cfg': {'nms': nms, 'max_per_img': 100}}
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    for dataset in datasets:
        dataset.pipeline = cfg.tta_pipeline
