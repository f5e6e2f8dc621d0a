"""Compares class names, in their order: a label must stand for one name in a training, its checkpoint and its tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import nn

from slab_det.common.errors import DataError, name_some


def check_classes(
    expected: Sequence[str] | None, classes: Sequence[str] | None, what: str, source: str, ann_file: str = ''
) -> None:
    """Raises DataError unless two lists of class names are equal, also in their order.

    Args:
        expected: The names that the labels of the detector stand for; None or empty where nothing tells them.
        classes: The names of a dataset; None or empty where it has none.
        what: The dataset, such as 'test dataset'.
        source: Where ``expected`` comes from.
        ann_file: The annotation file of the dataset, if it is known.
    """
    if not expected or not classes or [*expected] == [*classes]:
        return
    pairs = enumerate(zip_longest(expected, classes))
    label, (there, here) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
    raise DataError(
        f'{what}: its {len(classes)} classes ({name_some(classes)}) are not the {len(expected)} of {source} '
        f'({name_some(expected)}), in the same order: label {label} is {there!r} there and {here!r} here, so one '
        f'label would stand for two names. Set metainfo=dict(classes=…) of the {what} to the names of {source}, and '
        f'give "categories" of {ann_file or "its annotation file"} the same names in the same order; a category may '
        'have no object'
    )


def classes_of_meta(meta: dict) -> Sequence[str] | None:
    """The class names beside weights: in the ``meta`` of a checkpoint of mmdet 3 or 2, or of an exported file."""
    return _first(meta.get('dataset_meta') or {}).get('classes') or meta.get('CLASSES')


def metainfo_of(dataset: object) -> dict:
    """The metainfo of a dataset."""
    return _first(getattr(dataset, 'metainfo', {}))


def _first(metainfo: dict | Sequence[dict]) -> dict:
    # Datasets that differ, in a palette for example, have a list.
    return metainfo[0] if isinstance(metainfo, (list, tuple)) else metainfo


def names_classes_in_text(model: object) -> bool:
    """Whether a detector or its config finds what a text names, so that each dataset may have classes of its own."""
    name = 'language_model'
    if isinstance(model, nn.Module):
        return any(path.rpartition('.')[2] == name for path, _ in model.named_modules())
    # Wrappers for semi-supervised training and test-time augmentation hold the config of a detector.
    return isinstance(model, dict) and (name in model or any(map(names_classes_in_text, model.values())))
