"""Evaluates an exported detector on the test set of a config: AP by mmdet's own evaluators."""

import argparse

from slab_det.cli import command
from slab_det.cli.arguments import add_runner_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config with test_dataloader and test_evaluator, such as the fused one')
    parser.add_argument('file', help='output of slab-det export with --scope detector')
    add_runner_arguments(parser)
    runtimes = ('onnxruntime', 'openvino')
    parser.add_argument('--runtime', choices=runtimes, default=runtimes[0], help='(default %(default)s)')
    parser.add_argument('--precision', choices=('f32', 'bf16'), default='f32', help='bf16 needs --runtime openvino')
    parser.add_argument('--threads', type=int, default=0, help='CPU threads (default: the runtime chooses)')
    parser.add_argument('--json', metavar='FILE', help='write AP, dataset and versions to FILE')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Evaluates ``args.file`` and prints its AP."""
    import json

    from mmengine.fileio import put_text

    from slab_det.cli.config import config_from_arguments
    from slab_det.cli.runner import build_test_runner, use_exported
    from slab_det.measure.environment import describe_environment
    from slab_det.measure.report_file import ap_from_metrics, describe_dataset
    from slab_det.preflight import check_class_order, check_data, classes_of_meta
    from slab_det.runtime.memory import keep_freed_memory
    from slab_det.runtime.numbers import check_threads
    from slab_det.runtime.run_folder import check_writable

    keep_freed_memory()
    check_threads(args.threads, least=0)
    check_writable(args.json)
    cfg = config_from_arguments(args)
    check_data(cfg, ('test',))
    use_exported(cfg, args.file, runtime=args.runtime, threads=args.threads, precision=args.precision)
    runner = build_test_runner(cfg, args.verbose)
    check_class_order(cfg, 'test', classes_of_meta(runner.model.runtime.metadata) or (), args.file)
    metrics = runner.test()
    result = dict(
        config=args.config,
        file=args.file,
        runtime=args.runtime,
        precision=args.precision,
        dataset=describe_dataset(runner.test_dataloader.dataset),
        ap=ap_from_metrics(metrics),
        environment=describe_environment(),
    )
    for kind, values in result['ap'].items():
        shown = (f'{name} {100 * value:.1f}' for name, value in values.items() if value is not None)
        print(f'{kind}: {", ".join(shown)}')
    if args.json:
        put_text(json.dumps(result, indent=1) + '\n', args.json)


if __name__ == '__main__':
    main()
