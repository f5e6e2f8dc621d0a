"""Exports a fused detector to ONNX for images of any size, and compares the file with PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slab_det.cli import command
from slab_det.precisions import written_precisions

if TYPE_CHECKING:
    import numpy as np

# Sizes of the compared images: multiples of 32 and others, small and large, portrait and landscape.
SIZES = ((96, 160), (131, 203), (331, 97))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config of the detector, fused or not')
    parser.add_argument('checkpoint', help='its weights; recalibrated, gamma = 0')
    parser.add_argument('--out', required=True, metavar='FILE.onnx')
    choices = 'backbone', 'detector'
    parser.add_argument('--scope', choices=choices, default='detector', help='(default %(default)s)')
    parser.add_argument(
        '--opset',
        type=int,
        default=17,
        metavar='N',
        help='version of the ONNX operators, 16 to 20 (default %(default)s)',
    )
    parser.add_argument(
        '--dtype',
        choices=written_precisions(),
        default='float32',
        help='of weights and layers; boxes stay in float32, float16 is for GPUs (default %(default)s)',
    )
    parser.add_argument('--size', type=int, nargs=2, metavar=('H', 'W'), help='also compare on noise of this size')
    parser.add_argument('--check-images', nargs='+', default=[], metavar='FILE', help='also compare on photographs')
    group = parser.add_argument_group('int8')
    group.add_argument('--int8', action='store_true', help='also write FILE_int8.onnx, calibrated on images')
    group.add_argument(
        '--reduce-range',
        action='store_true',
        help='weights of 7 bits, for CPUs without VNNI instructions (default: if this CPU has none)',
    )
    group.add_argument('--images', metavar='DIR', help='pictures to calibrate on (default: training images)')
    group.add_argument('--num-images', type=int, default=100, help='calibration images (default %(default)s)')
    group.add_argument('--calibrate-with', metavar='CONFIG', help='config with the training images (default: config)')
    group.add_argument('--data-root', metavar='DIR', help='read every dataset of the config below DIR')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Exports ``args.checkpoint`` to ``args.out``, and with ``--int8`` to a second file."""
    import mmcv
    import numpy as np
    import torch

    from slab_det.checkpoints import build_detector
    from slab_det.cli.config import image_loader, read_config
    from slab_det.common.errors import SlabDetError
    from slab_det.common.files import check_writable, whole_file
    from slab_det.common.modules import input_channels
    from slab_det.common.numbers import check_size
    from slab_det.export import check_parity, export_onnx, load_runtime, quantize_onnx, random_images
    from slab_det.export.onnx_file import OPSETS
    from slab_det.fusion import check_statistics

    if not args.out.endswith('.onnx'):
        raise SlabDetError(f'--out {args.out} must end in .onnx')
    if args.opset not in OPSETS:
        raise SlabDetError(f'--opset {args.opset}: give {OPSETS[0]} to {OPSETS[-1]}')
    if args.size:
        check_size(args.size)
    int8 = args.out.removesuffix('.onnx') + '_int8.onnx'
    if (args.images or args.calibrate_with or args.data_root or args.reduce_range) and not args.int8:
        raise SlabDetError('--images, --calibrate-with, --data-root and --reduce-range are for int8; add --int8')
    if args.int8 and args.dtype != 'float32':
        raise SlabDetError(f'--int8 quantizes a float32 file; leave out --dtype {args.dtype}')
    # Missing images and read-only folders must raise before minutes of export.
    check_writable(args.out, int8 if args.int8 else None)
    if args.int8:
        cfg = read_config(args.calibrate_with or args.config, data_root=args.data_root)
        loader = image_loader(cfg, args.num_images, folder=args.images)
        calibration = (batch['inputs'][0][None].float().numpy() for batch in loader)
    photographs = [_read_photograph(path, args.size or (800, 1333)) for path in args.check_images]
    detector = build_detector(read_config(args.config), args.checkpoint)
    channels = input_channels(detector)
    images = random_images([*SIZES, *([tuple(args.size)] if args.size else [])], channels)
    for image in photographs:
        pixels = mmcv.bgr2gray(image, keepdim=True) if channels == 1 else image
        images.append(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], dtype=np.float32))
    check_statistics(detector, args.checkpoint)
    with whole_file(args.out) as name:
        export_onnx(detector, name, args.scope, args.opset, getattr(torch, args.dtype))
        print(f'The file in ONNX Runtime, {args.dtype}, against the detector in PyTorch, float64:')
        for check in check_parity(detector, load_runtime(name), images):
            print(f'  {check}')
    print(f'Written to {args.out}')
    if args.int8:
        nodes = quantize_onnx(args.out, int8, calibration, args.reduce_range or None)
        print(f'{len(nodes)} layers in int8, written to {int8}; slab-det test CONFIG {int8} measures its AP')


def _read_photograph(path: str, size: Sequence[int]) -> np.ndarray:
    """An image (H, W, 3) in BGR, as large as fits into ``size`` in either orientation."""
    import mmcv

    from slab_det.common.errors import SlabDetError

    image = mmcv.imread(path) if Path(path).is_file() else None
    if image is None:
        raise SlabDetError(f'--check-images: {path} is not a readable image')
    return mmcv.imrescale(image, (max(size), min(size)))


if __name__ == '__main__':
    main()
