"""Removes hidden channels that a trained detector needs least, or its LayerNorms, which its linear layers absorb, on
unlabelled images, without training. Writes the fused checkpoint, a config that loads it, and a config that
fine-tunes it towards the original detector."""

import argparse

from slab_det.cli import command, find_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config that the detector was trained with')
    parser.add_argument('checkpoint', help='weights of the detector')
    parser.add_argument('--out', required=True, metavar='FILE.pth', help='fused checkpoint, beside FILE_config.py')
    parser.add_argument('--data-root', metavar='DIR', help='root folder of all datasets of the config')
    parser.add_argument(
        '--images', metavar='DIR', help='folder of images to absorb on, without labels (default: training images)'
    )
    parser.add_argument('--num-images', type=int, default=100, help='number of images (default %(default)s)')
    parser.add_argument(
        '--pipeline',
        choices=('train', 'test'),
        default='test',
        help='pipeline that reads these images: of inference or of training (default %(default)s)',
    )
    parser.add_argument(
        '--channels',
        default='auto',
        metavar='SHARE',
        help="share of the detector's multiply-adds to leave, such as 0.5: hidden channels of FFNs, attention, the "
        'FPN and heads go where they cost least; 1 leaves all; auto takes the least share that retains 99 %% of the '
        'AP, by detections (default: auto)',
    )
    parser.add_argument(
        '--norms',
        nargs='+',
        default=['keep'],
        metavar='NORM',
        help='keep: leave all LayerNorms; remove: absorb those that can be absorbed; names: those that stay while the '
        'others are absorbed (default: keep)',
    )
    parser.add_argument('--int8', action='store_true', help='absorb for int8: higher AP in int8, lower AP in float32')
    parser.add_argument('--eval', action='store_true', help="also measure AP, on the config's validation images")
    parser.add_argument(
        '--work-dir', metavar='DIR', help='folder of intermediate results, from which the same command resumes'
    )
    parser.add_argument('--json', metavar='FILE', help='write the report and the table to FILE')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Removes channels or norms of ``args.checkpoint``, writes the student and compares it with its teacher."""
    from mmengine.config import Config

    import slab_det
    from slab_det.checkpoints import build_detector
    from slab_det.cli.config import check_out, image_loader, read_config
    from slab_det.common.files import check_writable
    from slab_det.common.record import describe_environment, write_record
    from slab_det.conversion import ConversionError, write_tune_config
    from slab_det.fusion import save_fused
    from slab_det.machine import find_device
    from slab_det.measure.evaluate import evaluate
    from slab_det.preflight import check_evaluation

    # Absorption may take hours, so later steps are checked first.
    check_out(args.out, args.checkpoint, args.config)
    check_writable(args.json)
    if args.images is not None and args.pipeline == 'train':
        raise ConversionError('--pipeline train needs the annotations of the training set; drop it or --images')
    cfg = read_config(args.config, data_root=args.data_root)
    device = find_device()
    teacher = build_detector(cfg, args.checkpoint).to(device)
    if args.eval:
        check_evaluation(cfg, teacher.dataset_meta, args.checkpoint)
    images = image_loader(cfg, args.num_images, args.pipeline, args.images)
    norms = args.norms if len(args.norms) > 1 else args.norms[0]
    options = dict(int8=args.int8, work_dir=args.work_dir)
    student = slab_det.absorb(teacher, images, _read_share(args.channels), norms, **options)
    checkpoint, config = save_fused(student, cfg, args.out, teacher.dataset_meta)
    print(f'Written to {checkpoint} and {config}')
    hint = ''
    if args.images is not None or cfg.get('train_dataloader'):
        schedule = Config.fromfile(find_folder('configs') / '_base_/schedules/tune_absorbed.py')
        tune = write_tune_config(cfg, config, checkpoint, args.checkpoint, schedule, args.images)
        on = args.images or 'the training set, with its labels'
        hint = f'\n\nTo fine-tune the student towards its teacher, on {on}: slab-det train {tune}'

    report, models = student.absorption_report, dict(teacher=teacher, student=student)
    rows = dict(
        teacher=dict(num_kept=len(report.norms), retained_ap=None if report.retained_ap is None else 1.0),
        student=dict(num_kept=len(report.kept), retained_ap=report.retained_ap),
    )
    if args.eval:
        for name, model in models.items():
            rows[name]['ap'] = evaluate(model, cfg)
    if args.json is not None:
        values = dict(
            **report.to_dict(),
            rows=rows,
            config=args.config,
            checkpoint=args.checkpoint,
            images=args.images or f'{len(images)} batches of the training set, pipeline {args.pipeline!r}',
            environment=describe_environment(device),
        )
        write_record(args.json, values)
    print(f'{report}\n\n{_format_rows(rows)}{hint}')


def _read_share(word: str) -> float | str:
    try:
        return word if word == 'auto' else float(word)
    except ValueError:
        # slab_det.absorb says what can be given.
        return word


def _format_rows(rows: dict[str, dict]) -> str:
    from slab_det.common.record import format_table
    from slab_det.measure.report_file import AP_KINDS, format_ap

    lines = []
    for name, row in rows.items():
        retained = '–' if row['retained_ap'] is None else f'{row["retained_ap"]:.1%}'
        line = {'detector': name, 'LayerNorms kept': str(row['num_kept']), 'AP retained (no labels)': retained}
        for kind in row.get('ap', ()):
            line[AP_KINDS[kind]] = format_ap(row['ap'], kind)
        lines.append(line)
    return format_table([*lines[0]], [[*line.values()] for line in lines])


if __name__ == '__main__':
    main()
