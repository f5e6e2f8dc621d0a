"""Evaluates a detector, an exported file, or a folder of slab-det optimize, and updates its report."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from slab_det.cli import command
from slab_det.cli.arguments import add_latency_arguments, add_runner_arguments, check_latency_options, latency_options
from slab_det.precisions import EXPORT_RUNTIMES, written_precisions

if TYPE_CHECKING:
    from torch import nn

    from slab_det.inference.folder import Stored
    from slab_det.inference.forms import Form
    from slab_det.measure.report_file import ReportEntry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config of the detector, or a folder of slab-det optimize, without checkpoint')
    parser.add_argument('checkpoint', nargs='?', help='checkpoint, or FILE.onnx of slab-det export --scope detector')
    add_runner_arguments(parser)
    parser.add_argument('--out', metavar='PKL', help='dump predictions to a pickle file')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR', help='save drawn predictions in WORK_DIR/TIMESTAMP/DIR')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds that an image is shown')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    parser.add_argument('--fuse', action='store_true', help='fuse the loaded model before testing it')
    parser.add_argument('--deploy', action='store_true', help='test the model after slab_det.deploy, in --dtype')
    parser.add_argument('--runtime', choices=EXPORT_RUNTIMES, help='runtime of FILE.onnx (default: onnxruntime)')
    parser.add_argument('--report', metavar='FILE', help='report to update (default: WORK_DIR/report.json)')
    parser.add_argument('--latency', action='store_true', help='measure batch-1 latency after the test')
    add_latency_arguments(parser)


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Tests the detector, measures its latency with ``--latency``, and updates its report."""
    test_detector(args)


def test_detector(args: argparse.Namespace) -> ReportEntry | None:
    """Does what :func:`main` says, and returns the new entry of the report; None in other ranks than the first."""
    from mmdet.utils import setup_cache_size_limit_of_dynamo
    from mmengine.dist import is_main_process

    import slab_det
    from slab_det.checkpoints import is_fused
    from slab_det.cli.config import check_report, config_from_arguments
    from slab_det.cli.runner import run_test, use_exported
    from slab_det.common.distributed import unwrap
    from slab_det.common.errors import SlabDetError
    from slab_det.common.files import check_writable
    from slab_det.common.memory import keep_freed_memory
    from slab_det.common.record import describe_environment
    from slab_det.inference.folder import find_stored
    from slab_det.measure import report_file
    from slab_det.preflight import check_data

    keep_freed_memory()
    setup_cache_size_limit_of_dynamo()
    stored = args.device = None
    if args.checkpoint is None or args.runtime or args.checkpoint.endswith('.onnx'):
        stored = find_stored(args.config) if args.checkpoint is None else stored_file(args)
        use_stored(args, stored)
    cfg = config_from_arguments(args)
    if args.tta and (args.latency or args.fuse or args.deploy):
        raise SlabDetError('--tta cannot be combined with --latency, --fuse or --deploy; leave out --tta')
    if cfg.get('default_scope') == 'mmpretrain' and (args.tta or args.show or args.show_dir):
        raise SlabDetError('--tta, --show and --show-dir are for detectors; leave them out')
    if args.out and not args.out.endswith(('.pkl', '.pickle')):
        raise SlabDetError(f'--out {args.out} must end in .pkl or .pickle')
    if args.latency:
        check_latency_options(args)
    if not 0 <= args.wait_time < math.inf:
        raise SlabDetError(f'--wait-time {args.wait_time}: give seconds from 0 on')
    path = Path(args.report or Path(cfg.work_dir) / 'report.json')
    check_report(path)
    check_writable(args.out)
    check_data(cfg, ('test',))
    description = report_file.describe_model(cfg.model)
    if stored and stored.form.is_exported:
        threads = stored.threads if args.threads is None else args.threads
        use_exported(cfg, args.checkpoint, runtime=stored.form.runtime, **stored.form.options(threads))
    runner, metrics = run_test(cfg, args)
    if not is_main_process():
        return None
    model, dataset = unwrap(runner.model), runner.test_dataloader.dataset
    device = next(chain(model.parameters(), model.buffers())).device
    suffix = f'-{find_form(stored, model).key}' if stored else report_file.form_suffix(args.deploy, args.dtype)
    description['name'] += '-TTA' * args.tta + suffix
    entry = report_file.ReportEntry(
        **description,
        variant='fused' if is_fused(model) else 'unfused',
        config=args.config,
        checkpoint=args.checkpoint,
        dataset=report_file.describe_dataset(dataset),
        ap=report_file.ap_from_metrics(metrics) or None,
        environment=describe_environment(device),
    )
    # Save AP first: the latency measurement may fail.
    report_file.update_report(path, entry)
    if args.latency:
        options = latency_options(args)
        options['image'] = options['image'] or dataset.get_data_info(0).get('img_path')
        options['size'] = options['size'] or tuple(dataset[0]['inputs'].shape[-2:])
        (result,) = slab_det.measure_latency({entry.name: model}, device=device, **options).values()
        entry = replace(entry, latency=result.to_dict())
        report_file.update_report(path, entry)
    print(f'\n{report_file.markdown_table([entry])}\nWritten to {path}')
    if args.show_dir:
        print(f'Predictions drawn in {Path(runner.work_dir, runner.timestamp, args.show_dir)}')
    return entry


def stored_file(args: argparse.Namespace) -> Stored:
    """Returns the exported file that the arguments name, and how it runs.

    Raises:
        SlabDetError: If this machine or the runtime cannot run it in ``--dtype``.
    """
    from slab_det.common.errors import SlabDetError
    from slab_det.common.numbers import check_threads
    from slab_det.inference.folder import Stored
    from slab_det.inference.forms import Form

    check_threads(args.threads, least=0)
    form = Form(args.runtime or EXPORT_RUNTIMES[0], args.dtype)
    if missing := form.find_missing('cpu'):
        raise SlabDetError(f'{args.checkpoint} in {form.key} needs {missing}')
    if args.dtype in written_precisions() and args.dtype != 'float32':
        raise SlabDetError(f'{args.checkpoint} itself says whether it is in {args.dtype}: leave out --dtype')
    args.dtype = 'float32'
    return Stored(form, Path(args.config), Path(args.checkpoint), 'cpu', 0)


def find_form(stored: Stored, model: nn.Module) -> Form:
    """The form that was tested; an exported file itself says that it is in int8 or float16."""
    precision = model.runtime.precision if stored.form.is_exported else 'float32'
    return stored.form if precision == 'float32' else replace(stored.form, precision=precision)


def use_stored(args: argparse.Namespace, stored: Stored) -> None:
    """Makes the arguments those of an exported file, or of the recommended form of a folder, in place.

    Raises:
        SlabDetError: If an argument says otherwise.
    """
    from slab_det.common.errors import SlabDetError

    flags = ('fuse', 'deploy', 'tta') + ('latency',) * stored.form.is_exported
    given = [f'--{name}' for name in flags if getattr(args, name)] + ['--dtype'] * (args.dtype != 'float32')
    if given:
        source = args.checkpoint or args.config
        raise SlabDetError(f'{source} says how its detector runs, as {stored.form.key}: leave out {given[0]}')
    if args.work_dir is None and args.checkpoint is None:
        args.work_dir = str(Path('work_dirs') / Path(args.config).resolve().name)
    args.device, args.config, args.checkpoint = stored.device, str(stored.config), str(stored.weights)
    if stored.form.runtime == 'torch':
        args.fuse, args.deploy, args.dtype = True, True, stored.form.precision


if __name__ == '__main__':
    main()
