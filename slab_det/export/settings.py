"""What an exported file keeps of its detector's config, and which other settings it can still follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.registry import MODELS
from mmengine.config import Config

import slab_det
from slab_det.common.config import detector_config, type_name
from slab_det.common.errors import ExportError
from slab_det.common.record import to_plain
from slab_det.families import EXPORTED, BoxFamily


class Settings(NamedTuple):
    """What a file can do otherwise than at its export.

    Attributes:
        score_thr: Detections with this score or a smaller one are dropped; None for the threshold of the file.
        max_per_img: The most detections; None for all that the file returns.
        mask_threshold: Smallest probability of a pixel inside a mask; None for a file without masks.
    """

    score_thr: float | None
    max_per_img: int | None
    mask_threshold: float | None


def find_resize(steps: Sequence[dict]) -> dict | None:
    """The config of the resize transform of a test pipeline, as JSON stores it; None if no transform resizes."""
    step = next((step for step in steps if 'Resize' in type_name(step['type'])), None)
    return step and to_plain(dict(step, type=type_name(step['type'])))


def describe_preprocessor(preprocessor: DetDataPreprocessor) -> dict:
    """The metadata of the preprocessing inside the graph: ``normalization`` and ``padding``."""
    normalization = dict(channel_order='RGB' if preprocessor._channel_conversion else 'BGR')
    if preprocessor._enable_normalize:
        normalization |= {name: getattr(preprocessor, name).flatten().tolist() for name in ('mean', 'std')}
    padding = dict(size_divisor=preprocessor.pad_size_divisor, value=float(preprocessor.pad_value))
    return dict(normalization=normalization, padding=padding)


def describe_test_cfg(stored: dict[str, dict], cfgs: Iterable[dict]) -> dict:
    """The metadata of the settings that change detections.

    Args:
        stored: See :class:`~slab_det.families.BoxFamily`.
        cfgs: ``test_cfg`` of each part in ``stored``.
    """
    described = {
        part: {key: _describe_nms(cfg) if key == 'nms' else cfg.get(key, default) for key, default in defaults.items()}
        for (part, defaults), cfg in zip(stored.items(), cfgs, strict=True)
    }
    return to_plain(described, str)


def _describe_nms(cfg: dict) -> dict:
    """The options of NMS that change its results, without those that have their default."""
    nms = {key: value for key, value in (cfg.get('nms') or {}).items() if key != 'split_thr' and value}
    return dict(nms, type=type_name(nms.get('type', 'nms')))


def detector_settings(cfg: Config) -> dict | None:
    """The config of the detector for :func:`follow_config`, with the data_preprocessor that a runner would pass it."""
    if 'model' not in cfg:
        return None
    detector = detector_config(cfg.model)
    return dict(detector, data_preprocessor=detector.get('data_preprocessor') or cfg.get('data_preprocessor'))


def follow_config(file: str, metadata: dict, detector: dict | None) -> Settings:
    """Compares a file with the config of a detector.

    Args:
        file: The file's name, for messages.
        metadata: What the file holds.
        detector: The config of the detector, of which ``test_cfg`` and ``data_preprocessor`` are read. None: the
            settings of the file.

    Returns:
        The settings of the config that the file can follow: thresholds of scores and masks, and fewer detections.

    Raises:
        ExportError: If the config has other settings that the file cannot follow.
    """
    given = (detector or {}).get('test_cfg') or {}
    mask_threshold = metadata.get('mask_threshold')
    settings = Settings(None, None, mask_threshold)
    if detector is None:
        return settings
    differences = list(_preprocessing_differences(metadata, detector.get('data_preprocessor')))
    if given:
        stored = _find_family(file, metadata).stored
        # The last part makes the detections.
        *_, last = stored
        cfgs = [given.get(part) or {} if part else given for part in stored]
        wanted, own = describe_test_cfg(stored, cfgs), metadata['test_cfg']
        score_thr, count = (wanted[last].pop(key) for key in ('score_thr', 'max_per_img'))
        own_score_thr, own_count = (own[last][key] for key in ('score_thr', 'max_per_img'))
        for part, values in wanted.items():
            differences += _differences(_path(part), {key: own[part][key] for key in values}, values)
        # Without a max_per_img mmdet does not predict, and -1 means no limit.
        is_smaller = count is not None and 0 < count and (count < own_count or own_count <= 0)
        if count != own_count and not is_smaller:
            differences.append(f'{_path(last)}max_per_img={own_count}, and this config {count}')
        threshold = cfgs[-1].get('mask_thr_binary', mask_threshold)
        if mask_threshold is not None and not 0 <= threshold:
            differences.append(f'{_path(last)}mask_thr_binary={mask_threshold}, and this config {threshold}')
        settings = Settings(
            score_thr=None if score_thr == own_score_thr else score_thr,
            max_per_img=None if count == own_count else count,
            mask_threshold=None if mask_threshold is None else threshold,
        )
    if differences:
        raise ExportError(
            f'{file} was exported with {"; ".join(differences)}: the file would find other objects; use the config of '
            'the export, or export again with this config'
        )
    return settings


def _path(part: str) -> str:
    """Where the settings of a part stand in a config; the part '' is ``test_cfg`` itself."""
    return f'test_cfg.{part}.' if part else 'test_cfg.'


def _find_family(file: str, metadata: dict) -> type[BoxFamily]:
    name = metadata['family']
    family = next((family for family in EXPORTED if family.name == name), None)
    if family is None:
        raise ExportError(
            f'{file} holds heads of the family {name!r}, which slab_det {slab_det.__version__} does not know: slab_det '
            f'{metadata["version"]} exported it; update slab_det'
        )
    return family


def _preprocessing_differences(metadata: dict, preprocessor: dict | None) -> Iterator[str]:
    if preprocessor is None:
        yield 'a data_preprocessor, and this config has none'
        return
    built = MODELS.build(preprocessor)
    if not isinstance(built, DetDataPreprocessor):
        yield f'a DetDataPreprocessor, and this config has a {type(built).__name__}'
        return
    for part, wanted in describe_preprocessor(built).items():
        yield from _differences(f'{part}.', metadata[part], wanted)


def _differences(prefix: str, own: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        f'{prefix}{key}={own.get(key)}, and this config {wanted.get(key)}'
        for key in dict.fromkeys((*own, *wanted))
        if own.get(key) != wanted.get(key)
    ]
