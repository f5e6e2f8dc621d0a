"""Absorbs the LayerNorms of a trained detector into its linear layers, on unlabelled images, without training: writes
the fused checkpoint, the config that loads it, and one that trains it beside its teacher."""

import argparse
import json
import re
import tempfile
from functools import partial

from slab_det.cli import command, find_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config that the LayerNorm detector was trained with')
    parser.add_argument('checkpoint', help='its weights')
    parser.add_argument('--out', required=True, metavar='FILE.pth', help='FILE_config.py is written beside it')
    parser.add_argument('--data-root', metavar='DIR', help='read every dataset of the config below DIR')
    parser.add_argument(
        '--images', metavar='DIR', help='pictures to absorb on, without annotations (default: training images)'
    )
    parser.add_argument('--num-images', type=int, default=100, help='how many images (default %(default)s)')
    parser.add_argument(
        '--pipeline',
        choices=('train', 'test'),
        default='test',
        help='these images as inference sees them, or as training did (default %(default)s)',
    )
    parser.add_argument(
        '--keep',
        nargs='+',
        metavar='KEEP',
        help='LayerNorms that stay: none; all; a whole number K, the least affine K; or names (default: as few as it '
        'takes to agree with the teacher, at most a quarter)',
    )
    parser.add_argument(
        '--ffn',
        type=float,
        default=0.0,
        metavar='SHARE',
        help='also take this share of the hidden channels out of each FFN, such as 0.75 (default %(default)s)',
    )
    parser.add_argument(
        '--int8', action='store_true', help='absorb for int8: the AP is better in int8 and worse in float32'
    )
    parser.add_argument(
        '--curve',
        type=int,
        nargs='+',
        default=[],
        metavar='K',
        help='also measure with the K least affine LayerNorms kept',
    )
    parser.add_argument('--eval', action='store_true', help="measure AP too, on the config's validation images")
    parser.add_argument('--rounds', type=int, default=30, help='rounds of the latency; 0: none (default %(default)s)')
    parser.add_argument('--threads', type=int, metavar='N', help="CPU threads of the latency (default: torch's)")
    parser.add_argument(
        '--work-dir', metavar='DIR', help='folder of intermediate results: the same command goes on from there'
    )
    parser.add_argument('--json', metavar='FILE', help='report of every norm and of every row of the table')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Absorbs the LayerNorms of ``args.checkpoint``, writes the result to ``args.out``, and prints what it costs."""
    import torch
    from mmengine.config import Config
    from mmengine.fileio import put_text

    import slab_det
    from slab_det.checkpoints.build import build_detector
    from slab_det.cli.absorb_curve import curve_table, measure_curve
    from slab_det.cli.config import check_out, read_config, read_images
    from slab_det.conversion import ConversionError, write_tune_config
    from slab_det.data import check_data
    from slab_det.fusion import save_fused
    from slab_det.runtime.config import type_name
    from slab_det.runtime.run_folder import check_writable

    check_out(args.out, args.checkpoint, args.config)
    check_writable(args.json)
    if min([args.rounds, *args.curve]) < 0:
        raise ConversionError('--curve and --rounds are numbers from 0 on')
    if args.images is not None and args.pipeline == 'train':
        raise ConversionError('--pipeline train needs the annotations of a training; leave it or --images out')
    keep = int(args.keep[0]) if args.keep and re.fullmatch(r'-?\d+', ' '.join(args.keep)) else args.keep
    cfg = read_config(args.config, data_root=args.data_root)
    if type_name(cfg.model.type) == 'FusedDetector' and not args.ffn:
        raise ConversionError(
            f'{args.config} belongs to a detector that was fused or absorbed before; give config and checkpoint of the '
            'LayerNorm detector, or --ffn 0.75 to prune its FFNs'
        )
    if args.eval:
        check_data(cfg, ('val',))
        if not (cfg.get('val_dataloader') and cfg.get('val_evaluator')):
            raise ConversionError(f'--eval: {args.config} has no val_dataloader and val_evaluator')
    teacher = build_detector(cfg, args.checkpoint).to('cuda' if torch.cuda.is_available() else 'cpu')
    images = read_images(cfg, args.num_images, args.pipeline, args.images)
    # Without a folder, the norms that students of the curve share would be absorbed again for each of them.
    finished = tempfile.TemporaryDirectory(prefix='slab_det_curve_') if args.curve else None
    work_dir = args.work_dir or (finished and finished.name)
    absorb = partial(slab_det.absorb, teacher, images, int8=args.int8, ffn=args.ffn, work_dir=work_dir)
    students = {}
    if args.curve:
        everything = absorb(keep=0)
        ranked = everything.absorption_report.rank()
        students = {f'worst {k} kept': absorb(keep=ranked[:k]) if k else everything for k in sorted({*args.curve})}
    students['written'] = student = absorb(keep=keep)
    report = student.absorption_report
    # At once: absorption may have taken hours, and what follows may fail.
    checkpoint, config = save_fused(student, cfg, args.out, teacher.dataset_meta)
    print(f'Written to {checkpoint} and {config}')
    if args.rounds:
        print('Latency is measured now; --rounds 0 leaves it out.')
    hint = ''
    if args.images is not None or cfg.get('train_dataloader'):
        schedule = Config.fromfile(find_folder('configs') / '_base_/schedules/tune_absorbed.py')
        tune = write_tune_config(cfg, config, checkpoint, args.checkpoint, schedule, args.images)
        on = 'the training set, with its labels' if args.images is None else args.images
        hint = f'\n\nTo train it a little more beside its teacher, on {on}: slab-det train {tune}'
    sample = next(iter(images))
    points = measure_curve(
        teacher,
        students,
        rounds=args.rounds,
        eval_cfg=cfg if args.eval else None,
        size=tuple(sample['inputs'][0].shape[-2:]),
        image=sample['data_samples'][0].get('img_path'),
        warmup=5,
        device=next(teacher.parameters()).device,
        threads=args.threads,
        progress=True,
    )
    if args.json is not None:
        values = dict(
            **report.to_dict(),
            points=[point | dict(latency=point['latency'] and point['latency'].to_dict()) for point in points],
            config=args.config,
            checkpoint=args.checkpoint,
            images=args.images or f'{len(images)} batches of the training set, pipeline {args.pipeline!r}',
        )
        put_text(json.dumps(values, indent=1) + '\n', args.json)
    print(f'{report}\n\n{curve_table(points)}{hint}')
