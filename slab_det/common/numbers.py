"""Checks numbers that users give: sizes of images and threads."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import PIL.Image

from slab_det.common.errors import SlabDetError
from slab_det.machine import MACHINE


def check_size(size: Sequence[int], error: type[SlabDetError] = SlabDetError, name: str = '--size ') -> None:
    """Raises ``error`` unless ``size`` is a height and a width from 1 on, of at most Pillow's limit of pixels.

    Args:
        size: The height and the width.
        error: The class of the error.
        name: What stands before the size where the user gives it, as ``size=``.
    """
    limit = PIL.Image.MAX_IMAGE_PIXELS or float('inf')
    sides = [*size]
    if len(sides) != 2 or not all(isinstance(side, Integral) for side in sides) or min(sides) < 1:
        raise error(f'{name}{" ".join(map(str, sides))}: height and width are two whole numbers, at least 1')
    if sides[0] * sides[1] > limit:
        raise error(
            f'{name}{sides[0]} {sides[1]}: more than {limit:,} pixels, the limit PIL.Image.MAX_IMAGE_PIXELS; give a '
            'smaller size'
        )


def check_threads(
    threads: int | None, error: type[SlabDetError] = SlabDetError, least: int = 1, name: str = '--threads '
) -> None:
    """Raises ``error`` unless ``threads`` is None or a number of threads that this process may use.

    Args:
        threads: The number.
        error: The class of the error.
        least: The smallest number.
        name: What stands before the number where the user gives it, as ``threads=``.
    """
    most = MACHINE.processors
    if threads is not None and not (isinstance(threads, Integral) and least <= threads <= most):
        raise error(
            f'{name}{threads}: give a whole number from {least} to {most}, the processors that this process may use'
        )
