"""Re-estimates the norm statistics of a checkpoint on training images. The output is not fused."""

import argparse

from slab_det.cli import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='training config of the detector')
    parser.add_argument('checkpoint', help='checkpoint of the detector, such as best_*.pth; gamma stays')
    parser.add_argument('--out', required=True, metavar='FILE.pth', help='output checkpoint')
    parser.add_argument('--num-images', type=int, default=500, help='training images (default %(default)s)')
    parser.add_argument(
        '--pipeline',
        choices=('train', 'test'),
        default='train',
        help='images as training saw them or as inference sees them (default %(default)s)',
    )
    parser.add_argument('--max-passes', type=int, metavar='N', help='at most N passes (default: until convergence)')
    parser.add_argument('--data-root', metavar='DIR', help='read every dataset of the config below DIR')
    parser.add_argument('--json', metavar='FILE', help='write the report to FILE')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Recalibrates ``args.checkpoint`` and writes it to ``args.out``."""
    from mmengine.runner import save_checkpoint
    from mmengine.runner.checkpoint import weights_to_cpu

    import slab_det
    from slab_det.checkpoints import build_detector
    from slab_det.cli.config import check_out, image_loader, read_config
    from slab_det.common.files import check_writable
    from slab_det.common.record import describe_environment, write_record
    from slab_det.machine import find_device

    check_out(args.out, args.checkpoint)
    check_writable(args.json)
    cfg = read_config(args.config, data_root=args.data_root)
    device = find_device()
    model = build_detector(cfg, args.checkpoint).to(device)
    images = image_loader(cfg, args.num_images, args.pipeline)
    report = slab_det.recalibrate(model, images, max_passes=args.max_passes)
    # DetInferencer understands a missing dataset_meta, but not None.
    meta = {} if model.dataset_meta is None else dict(dataset_meta=model.dataset_meta)
    save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(model.state_dict())), args.out)
    if args.json is not None:
        environment = describe_environment(device)
        write_record(args.json, dict(report.to_dict(), pipeline=args.pipeline, environment=environment))
    print(f'{report}, on images of the {args.pipeline} pipeline\nWritten to {args.out}')


if __name__ == '__main__':
    main()
