"""Evaluates a detector and fills report.json. mmdet's arguments, and --data-root, --fuse, --deploy and --latency."""

import argparse
from dataclasses import replace
from pathlib import Path

from mmengine.config import Config, ConfigDict

from slab_det.cli import command
from slab_det.cli.arguments import add_latency_arguments, add_runner_arguments, latency_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config of the detector')
    parser.add_argument('checkpoint', help='its weights')
    add_runner_arguments(parser)
    parser.add_argument('--out', metavar='PKL', help='dump predictions to a pickle file')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR', help='save drawn predictions in WORK_DIR/TIMESTAMP/DIR')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds that an image is shown')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    parser.add_argument('--fuse', action='store_true', help='fuse the loaded model before testing it')
    parser.add_argument('--deploy', action='store_true', help='test what slab_det.deploy makes of it, in --dtype')
    parser.add_argument('--report', metavar='FILE', help='report to fill; default WORK_DIR/report.json')
    parser.add_argument('--latency', action='store_true', help='measure batch-1 latency after the test')
    add_latency_arguments(parser)


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Tests the detector of ``args``, measures its latency if asked to, and fills its report."""
    from mmdet.engine.hooks.utils import trigger_visualization_hook
    from mmdet.evaluation import DumpDetResults
    from mmdet.utils import setup_cache_size_limit_of_dynamo
    from mmengine.dist import is_main_process

    import slab_det
    from slab_det.checkpoints import is_fused
    from slab_det.cli.config import config_from_arguments
    from slab_det.cli.runner import build_test_runner
    from slab_det.data import check_data
    from slab_det.deployment.precision import autocast_forward
    from slab_det.measure.environment import describe_environment
    from slab_det.measure.latency import DTYPES
    from slab_det.measure.report import (
        ReportEntry,
        ap_from_metrics,
        describe_dataset,
        describe_model,
        form_suffix,
        markdown_table,
        read_report,
        update_report,
    )
    from slab_det.runtime.config import type_name
    from slab_det.runtime.distributed import unwrap
    from slab_det.runtime.errors import SlabDetError
    from slab_det.runtime.run_folder import check_writable

    setup_cache_size_limit_of_dynamo()
    cfg = config_from_arguments(args)
    if cfg.get('default_scope') == 'mmpretrain' and (args.tta or args.show or args.show_dir):
        raise SlabDetError('--tta, --show and --show-dir are for detectors; leave them out')
    if args.tta and (args.latency or args.fuse or args.deploy):
        raise SlabDetError('--latency, --fuse and --deploy are for the plain detector; leave out --tta')
    if args.out and not args.out.endswith(('.pkl', '.pickle')):
        raise SlabDetError(f'--out {args.out} must end in .pkl or .pickle')
    path = Path(args.report or Path(cfg.work_dir) / 'report.json')
    check_writable(path, args.out)
    check_data(cfg, ('test',))
    if path.exists():
        # A file that cannot be added to is found now, not after the test.
        read_report(path)
    # Each form of a detector has its own entry.
    description = describe_model(cfg.model)
    description['name'] += '-TTA' * args.tta + form_suffix(args.deploy, args.dtype)
    # The config of a resumed run would resume again.
    cfg.load_from, cfg.resume = args.checkpoint, False
    if args.show or args.show_dir:
        trigger_visualization_hook(cfg, args)
    if args.tta:
        enable_test_time_augmentation(cfg)
    # The checkpoint has the averaged weights already, and the statistics that were recalibrated for them; EMAHook would
    # swap in statistics of the training, or its copy of a model that is fused by now.
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks') or [] if type_name(hook.type) != 'EMAHook']
    runner = build_test_runner(cfg)
    model, dtype = unwrap(runner.model), DTYPES[args.dtype]
    if args.tta and getattr(model, 'with_mask', False):
        raise SlabDetError('--tta: mmdet merges boxes alone, and this detector finds masks; leave it out')
    if args.fuse or args.deploy:
        runner.load_or_resume()
        model.eval()
    if args.fuse:
        slab_det.fuse(model, inplace=True)
    if args.deploy:
        slab_det.deploy(model, dtype, inplace=True)
    elif args.dtype != 'float32':
        autocast_forward(model, dtype)
    if args.out:
        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=args.out))
    metrics = runner.test()
    if not is_main_process():
        return
    dataset = runner.test_dataloader.dataset
    device = next(model.parameters()).device
    entry = ReportEntry(
        **description,
        variant='fused' if is_fused(model) else 'unfused',
        config=args.config,
        checkpoint=args.checkpoint,
        dataset=describe_dataset(dataset),
        ap=ap_from_metrics(metrics) or None,
        environment=describe_environment(device),
    )
    # At once: AP took long, and the measurement of latency may fail.
    update_report(path, entry)
    if args.latency:
        options = latency_options(args)
        options['image'] = options['image'] or dataset.get_data_info(0).get('img_path')
        options['size'] = options['size'] or tuple(dataset[0]['inputs'].shape[-2:])
        (result,) = slab_det.measure_latency(
            {description['name']: model}, device=device, progress=True, **options
        ).values()
        entry = replace(entry, latency=result.to_dict())
        update_report(path, entry)
    print(f'\n{markdown_table([entry])}\nWritten to {path}')
    if args.show_dir:
        print(f'Predictions drawn in {Path(runner.work_dir, runner.timestamp, args.show_dir)}')


def enable_test_time_augmentation(cfg: Config) -> None:
    """Wraps model and test pipeline of a config for TTA, in place; it flips images if it has no tta_pipeline."""
    from slab_det.runtime.config import walk_datasets

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
