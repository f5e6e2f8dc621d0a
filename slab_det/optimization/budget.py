"""TimeBudget: the time of an optimization, and how long its next step will take."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

# What a step takes that was not seen yet: seconds, and predictions of the original detector. Measured with Mask and
# Faster R-CNN at 160x192 and 400x640 on one thread; 'absorb' is for each image, 'quantize' for CALIBRATION_IMAGES.
COSTS = dict(load=(4, 3), export=(4, 3), quantize=(20, 65), absorb=(0, 12))


class TimeBudget:
    """The time for a work of several steps.

    Args:
        seconds: The time, from now.
        seen: The longest seconds of each kind of step so far, by a key of :data:`COSTS`; :meth:`step` adds to it.

    Attributes:
        prediction: Seconds in which the original detector predicts; 0 until they are known.
    """

    def __init__(self, seconds: float, seen: MutableMapping[str, float]) -> None:
        self.seconds, self.deadline, self.seen = seconds, time.monotonic() + seconds, seen
        self.prediction = 0.0

    def estimate(self, kind: str) -> float:
        """Seconds that a step will take: as many as the longest of its kind so far, or what is usual."""
        fixed, predictions = COSTS[kind]
        return self.seen.get(kind, fixed + predictions * self.prediction)

    def fits(self, seconds: float) -> bool:
        """Whether as many seconds are left."""
        return time.monotonic() + seconds <= self.deadline

    @contextmanager
    def step(self, kind: str, parts: int = 1) -> Iterator[None]:
        """Remembers how long the block takes, for each of its parts."""
        start = time.monotonic()
        yield
        self.seen[kind] = max((time.monotonic() - start) / parts, self.seen.get(kind, 0.0))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Does not count the time of the block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.deadline += time.monotonic() - start
