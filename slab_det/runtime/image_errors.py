"""Errors of data pipelines, which name the image."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from traceback import extract_tb
from typing import Any

from mmengine.dataset import BaseDataset

from slab_det.runtime.errors import DataError


def install_image_errors() -> None:
    """Names the image in every error of a dataset's pipeline, also of a data loader's worker.

    Mends ``BaseDataset.prepare_data``: mmdet's transforms say what is wrong with an array, not whose it is.
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/dataset/base_dataset.py
    """
    if not hasattr(BaseDataset.prepare_data, '__wrapped__'):
        BaseDataset.prepare_data = name_image(BaseDataset.prepare_data)


def name_image(prepare_data: Callable[[BaseDataset, int], Any]) -> Callable[[BaseDataset, int], Any]:
    """``BaseDataset.prepare_data`` that raises DataError."""

    @wraps(prepare_data)
    def prepare_named(self: BaseDataset, idx: int) -> Any:
        try:
            return prepare_data(self, idx)
        except Exception as error:
            image = self.get_data_info(idx).get('img_path', f'item {idx}')
            place = extract_tb(error.__traceback__)[-1]
            reason = ' '.join(f'{type(error).__name__}: {error}'.split())
            raise DataError(
                f'{image} does not pass the pipeline of its dataset ({reason} in {Path(place.filename).name}, line '
                f'{place.lineno}): correct the image or its annotations, or take it out of the annotation file'
            ) from error

    return prepare_named
