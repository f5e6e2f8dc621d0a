"""Evaluates a detector and fills report.json. mmdet's arguments, and --data-root --fuse --deploy --dtype --latency."""

import argparse

from slab_det_arguments import add_latency_arguments, add_runner_arguments


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of the detector')
    parser.add_argument('checkpoint', help='its weights')
    add_runner_arguments(parser)
    parser.add_argument('--out', metavar='PKL', help='dump predictions to a pickle file')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR', help='save drawn predictions in WORK_DIR/TIMESTAMP/DIR')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds a shown image stays')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    parser.add_argument('--fuse', action='store_true', help='fuse the loaded model before testing it')
    parser.add_argument('--deploy', action='store_true', help='test what slab_det.deploy makes of it, in --dtype')
    parser.add_argument('--report', metavar='FILE', help='report to fill; default WORK_DIR/report.json')
    parser.add_argument('--latency', action='store_true', help='measure batch-1 latency after the test')
    add_latency_arguments(parser)
    return parser.parse_args()


if __name__ == '__main__':
    # Before the imports that take seconds.
    args = parse_arguments()

import slab_det  # noqa: I001 (before mmdet: registers everything)

from dataclasses import replace
from pathlib import Path

from mmdet.engine.hooks.utils import trigger_visualization_hook
from mmdet.evaluation import DumpDetResults
from mmdet.utils import setup_cache_size_limit_of_dynamo
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.runner import Runner

from slab_det.cli import (
    build_runner,
    build_test,
    config_from_arguments,
    enable_test_time_augmentation,
    latency_options,
    run_cli,
)
from slab_det.data import check_data
from slab_det.checkpoints import is_fused
from slab_det.measure.environment import describe_environment
from slab_det.runtime.config import type_name
from slab_det.runtime.distributed import unwrap
from slab_det.runtime.errors import SlabDetError
from slab_det.runtime.run_folder import check_writable
from slab_det.deployment.precision import autocast_forward
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


def check_arguments(args: argparse.Namespace, cfg: Config) -> None:
    if cfg.get('default_scope') == 'mmpretrain' and (args.tta or args.show or args.show_dir):
        raise SlabDetError('--tta, --show and --show-dir are for detectors; leave them out')
    if args.tta and (args.latency or args.fuse or args.deploy):
        raise SlabDetError('--latency, --fuse and --deploy are for the plain detector; leave out --tta')
    if args.out and not args.out.endswith(('.pkl', '.pickle')):
        raise SlabDetError(f'--out {args.out} must end in .pkl or .pickle')


def test(cfg: Config, args: argparse.Namespace) -> tuple[Runner, dict]:
    """Runs the test loop and returns the runner and its metrics."""
    # The config of a run that was resumed would resume again.
    cfg.load_from, cfg.resume = args.checkpoint, False
    if args.show or args.show_dir:
        trigger_visualization_hook(cfg, args)
    if args.tta:
        enable_test_time_augmentation(cfg)
    # The checkpoint has the averaged weights already, and the statistics that were recalibrated for them; EMAHook would
    # swap in statistics of the training, or its copy of a model that is fused by now.
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks') or [] if type_name(hook.type) != 'EMAHook']
    runner = build_runner(cfg, args.verbose)
    build_test(runner)
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
    return runner, runner.test()


def main(args: argparse.Namespace) -> None:
    setup_cache_size_limit_of_dynamo()
    cfg = config_from_arguments(args)
    check_arguments(args, cfg)
    path = Path(args.report or Path(cfg.work_dir) / 'report.json')
    check_writable(path, args.out)
    check_data(cfg, ('test',))
    if path.exists():
        # A file that cannot be added to is found now, not after the test.
        read_report(path)
    # Every form of a detector has an entry of its own.
    description = describe_model(cfg.model)
    description['name'] += '-TTA' * args.tta + form_suffix(args.deploy, args.dtype)
    runner, metrics = test(cfg, args)
    if not is_main_process():
        return
    model, dataset = unwrap(runner.model), runner.test_dataloader.dataset
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
    # AP took longer than what may fail now.
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


if __name__ == '__main__':
    run_cli(main, args)
