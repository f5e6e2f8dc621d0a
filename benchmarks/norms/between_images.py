"""How much the images of a dataset differ: the share of the variance of pixels that lies between images.

    python benchmarks/norms/between_images.py data/bccd/images/train data/dsb2018/images/train data/coco/train2017

Per colour channel, with images of equal weight, b = Var(mean of an image) / (Var(mean of an image) + mean(variance
within an image)). A norm with one set of statistics for all images makes only their union standard; of each image it
leaves a mean that is off by sqrt(b) sigmas, root mean square. At 0 images are alike, at 1 each is of one colour.
"""

import argparse
from pathlib import Path

import cv2
import numpy as np
from mmengine.utils import track_iter_progress

from slab_det.cli import run_cli
from slab_det.recalibration.images import evenly_spaced
from slab_det.runtime.errors import DataError


def share_between(images: list[Path]) -> np.ndarray:
    """b for each colour channel, (3,), in the order blue, green, red."""
    means, variances = [], []
    for path in track_iter_progress(images):
        image = cv2.imread(str(path))
        if image is None:
            raise DataError(f'{path} cannot be decoded')
        pixels = image.reshape(-1, 3).astype(np.float64)
        means.append(pixels.mean(0))
        variances.append(pixels.var(0))
    between = np.var(means, axis=0)
    return between / (between + np.mean(variances, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folders', nargs='+', type=Path)
    parser.add_argument('--num-images', type=int, default=300, help='evenly spaced; default %(default)s')
    args = parser.parse_args()
    if args.num_images < 1:
        raise DataError(f'--num-images {args.num_images}: at least one image is needed')
    for folder in args.folders:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in {'.jpg', '.jpeg', '.png'})
        if not files:
            raise DataError(f'{folder} has no images')
        chosen = [files[i] for i in evenly_spaced(len(files), args.num_images)]
        shares = ', '.join(f'{share:.2f}' for share in share_between(chosen))
        print(f'\n{folder}, {len(chosen)} images: {shares}')


if __name__ == '__main__':
    run_cli(main)
