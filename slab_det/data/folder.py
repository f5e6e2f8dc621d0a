"""ImageFolder: a dataset of the images in a folder, for absorption, recalibration and distillation."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmdet.registry import DATASETS
from torch.utils.data import Dataset

from slab_det.common.errors import DataError
from slab_det.common.pipeline import ImagePipeline

IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


@DATASETS.register_module()
class ImageFolder(Dataset):
    """The images in a folder and its subfolders, sorted by name, without labels and without hidden files.

    Args:
        folder: The folder.
        pipeline: Configs of the transforms; annotations are not loaded.
        metainfo: The class names of the detector; a training stores them in its checkpoints.

    Raises:
        DataError: If the folder holds no image; at access, if an image cannot be read or does not pass the pipeline.
    """

    def __init__(self, folder: str | Path, pipeline: Sequence[dict], metainfo: dict | None = None) -> None:
        self.files = sorted(list_images(Path(folder)))
        if not self.files:
            what = 'holds no image' if Path(folder).is_dir() else 'is not a folder'
            raise DataError(f'{folder} {what}; give a folder of {", ".join(IMAGE_SUFFIXES)} files')
        self.pipeline = ImagePipeline(pipeline)
        if metainfo is not None:
            # A plain dict: the allow-list for checkpoints has no ConfigDict.
            self.metainfo = dict(metainfo)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict:
        return self.pipeline(self.files[index], img_id=index)


def list_images(folder: Path) -> Iterator[Path]:
    """Yields the images in a folder, its subfolders and linked folders; each folder once, and no hidden ones."""
    # A link to a folder above, followed without end, would also list images again and again.
    seen = {str(parent) for parent in Path(os.path.realpath(folder)).parents}
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith('.'))
        for path in (Path(parent, name) for name in files if not name.startswith('.')):
            if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
                yield path
