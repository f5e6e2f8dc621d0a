"""Measures the batch-1 latency of the models of several configs, in alternating rounds in one process."""

import argparse
from dataclasses import replace
from pathlib import Path

from slab_det.cli import command
from slab_det.cli.arguments import ConfigOptions, add_latency_arguments, check_latency_options, latency_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('configs', nargs='+', metavar='CONFIG', help='models to measure; ratios compare with the first')
    parser.add_argument('--checkpoint', nargs='+', metavar='FILE', help='one per config, or "none" for random weights')
    parser.add_argument('--fuse', action='store_true', help='fuse every model; LayerNorms stay')
    parser.add_argument('--deploy', action='store_true', help='measure the models after slab_det.deploy, in --dtype')
    parser.add_argument('--device', help='cpu, cuda or cuda:N (default: cuda where there is one)')
    parser.add_argument('--json', metavar='FILE', help='report to fill, which slab-det report reads')
    parser.add_argument('--cfg-options', nargs='+', action=ConfigOptions, metavar='KEY=VALUE')
    add_latency_arguments(parser, size=(800, 1333))


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Measures the models of ``args.configs``, prints a table, and fills ``args.json``."""
    import torch

    import slab_det
    from slab_det.checkpoints import build_detector, is_fused
    from slab_det.cli.config import check_report, read_config
    from slab_det.common.errors import SlabDetError
    from slab_det.common.memory import keep_freed_memory
    from slab_det.machine import find_device
    from slab_det.measure.latency import latency_table
    from slab_det.measure.report_file import ReportEntry, describe_model, form_suffix, update_report
    from slab_det.measure.untrained import OBJECTS, prepare_untrained

    checkpoints = [None if name == 'none' else name for name in args.checkpoint or ['none'] * len(args.configs)]
    if len(checkpoints) != len(args.configs):
        raise SlabDetError(f'{len(args.configs)} configs but {len(checkpoints)} checkpoints; "none": random weights')
    pairs = list(zip(args.configs, checkpoints, strict=True))
    if len({*pairs}) < len(pairs):
        raise SlabDetError('a config is listed twice; leave one out')
    keep_freed_memory()
    check_report(args.json)
    check_latency_options(args)
    device = find_device(args.device)
    models, entries = {}, []
    for config, checkpoint in pairs:
        cfg = read_config(config, args.cfg_options)
        # Move the model first: slab_det.deploy chooses convolutions by the device of their weights.
        model = build_detector(cfg, checkpoint).to(device)
        if checkpoint is None:
            prepared = prepare_untrained(model)
            heads = f'heads set to find {OBJECTS} objects' if prepared else 'heads that find any number of objects'
            print(f'{config}: no checkpoint, so random weights, gamma = 0, {heads}')
        if args.fuse:
            model = slab_det.fuse(model, inplace=True)
        if args.deploy:
            model = slab_det.deploy(model, getattr(torch, args.dtype), inplace=True)
        variant = 'fused' if is_fused(model) else 'unfused'
        form = f'{variant}, deployed' if args.deploy else variant
        name = f'{Path(config).stem} ({form})'
        if name in models:
            # Every work directory has a fused_config.py.
            name = f'{config} with {checkpoint or "random weights"} ({form})'
        models[name] = model
        description = describe_model(cfg.model)
        description['name'] += form_suffix(args.deploy, args.dtype)
        entries.append(ReportEntry(**description, variant=variant, config=config, checkpoint=checkpoint))
    results = slab_det.measure_latency(models, device=device, **latency_options(args))
    print(latency_table(results))
    if args.json:
        measured = zip(entries, results.values(), strict=True)
        update_report(args.json, *(replace(entry, latency=result.to_dict()) for entry, result in measured))
        print(f'Written to {args.json}')


if __name__ == '__main__':
    main()
