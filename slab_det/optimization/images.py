"""SplitImages: the images of an optimization, some to fit absorbed and int8 detectors to, others to compare on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from mmengine.config import Config
from torch.utils.data import DataLoader, Subset

from slab_det.common.errors import DataError
from slab_det.recalibration import image_folder_dataloader

# Every third image is held out. With a single one held out nothing says how far an estimated loss may be off.
NTH_HELD_OUT = 3
LEAST_IMAGES = 2 * NTH_HELD_OUT
# Absorption takes seconds for each image, and more improve an absorbed detector little.
MOST_FITTED = 40


class SplitImages:
    """Images of a folder; every third one is held out from absorption and calibration, to compare detections on.

    Args:
        cfg: Config of the detector.
        folder: The folder.
        num_images: Number of images, evenly spaced over the folder.

    Attributes:
        names: The file of each image.
        contents: The bytes of each held-out image, by its index.
        shapes: Height and width after the test pipeline of each held-out image, by its index.
        fitted: Loads the other images, one a batch.

    Raises:
        DataError: If the folder holds no readable image, or fewer than six.
    """

    def __init__(self, cfg: Config, folder: str | Path, num_images: int) -> None:
        loader = image_folder_dataloader(cfg, folder, num_images)
        dataset = loader.dataset
        self.names = [Path(dataset.dataset.files[index]) for index in dataset.indices]
        count = len(self.names)
        if count < LEAST_IMAGES:
            raise DataError(
                f'{folder}: {count} image{"s" if count != 1 else ""}, but at least {LEAST_IMAGES} are needed, a third '
                'of them to compare on: give more, or a larger num_images'
            )
        held_out = range(NTH_HELD_OUT - 1, count, NTH_HELD_OUT)
        self.contents = {i: self.names[i].read_bytes() for i in held_out}
        self.shapes = {i: tuple(dataset[i]['data_samples'].img_shape) for i in held_out}
        others = [i for i in range(count) if i not in held_out]
        num_fitted = min(MOST_FITTED, len(others))
        self._dataset, self._collate = dataset, loader.collate_fn
        fitted = self._prepared([others[i * len(others) // num_fitted] for i in range(num_fitted)])
        self.fitted = DataLoader(fitted, batch_size=1, collate_fn=self._collate)

    def load(self, index: int) -> DataLoader:
        """One image, prepared as for inference."""
        return DataLoader(self._prepared([index]), batch_size=1, collate_fn=self._collate)

    def digest(self) -> str:
        """A digest of the bytes of all images."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(name.read_bytes())
        return digest.hexdigest()

    def _prepared(self, indices: Sequence[int]) -> Subset:
        """Images whose batches are prepared as for inference."""
        images = Subset(self._dataset, indices)
        images.test_mode = True
        return images

    def describe_sizes(self) -> str:
        """Says which sizes the held-out images have after the test pipeline."""
        sizes = sorted({*self.shapes.values()}, key=lambda size: size[0] * size[1])
        low, high = ('x'.join(map(str, size)) for size in (sizes[0], sizes[-1]))
        return low if low == high else f'{low} to {high}'
