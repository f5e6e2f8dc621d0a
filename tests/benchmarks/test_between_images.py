"""The share of the variance between images, on images whose share is known."""

import cv2
import numpy as np
import pytest

from benchmarks.norms.between_images import share_between
from slab_det.recalibration.images import evenly_spaced


def write(folder, *images):
    paths = [folder / f'{index}.png' for index in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        cv2.imwrite(str(path), image)
    return paths


def stripes(low, high):
    """Half of the pixels of each value: mean (low + high) / 2, variance ((high - low) / 2) ** 2."""
    image = np.full((4, 6, 3), low, np.uint8)
    image[:, 3:] = high
    return image


def test_images_of_one_colour_each_differ_in_nothing_else(tmp_path):
    assert share_between(write(tmp_path, stripes(10, 10), stripes(90, 90))) == pytest.approx([1, 1, 1])


def test_equal_images_do_not_differ(tmp_path):
    assert share_between(write(tmp_path, stripes(10, 90), stripes(90, 10))) == pytest.approx([0, 0, 0])


def test_the_share_is_that_of_each_channel_and_images_count_alike(tmp_path):
    # Means 50 and 110: variance 900 between. Variances 1600 and 400: 1000 within.
    first, second = stripes(10, 90), stripes(90, 130)
    second[..., 2] = first[..., 2]
    assert share_between(write(tmp_path, first, np.tile(second, (5, 1, 1)))) == pytest.approx([900 / 1900] * 2 + [0])


def test_images_are_taken_from_the_whole_folder():
    assert evenly_spaced(531, 300)[-1] == 529
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]
    assert evenly_spaced(2, 300) == [0, 1]
