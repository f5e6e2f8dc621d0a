"""Reads and edits the dictionaries of mmengine configs."""

from __future__ import annotations

from collections.abc import Callable


def type_name(kind: str | Callable) -> str:
    """The bare name of a config's ``type``: 'mmdet.MaskRCNN', 'MaskRCNN' and the class itself all give 'MaskRCNN'."""
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__


def detector_config(model: dict) -> dict:
    """The config of the plain detector inside that of a DistilledDetector or FusedDetector; else ``model`` itself."""
    inside = {'DistilledDetector': 'student', 'FusedDetector': 'model'}
    while type_name(model['type']) in inside:
        model = model[inside[type_name(model['type'])]]
    return model


def drop_pretrained(model: dict) -> None:
    """Removes what would load pretrained weights from a detector's config, in place."""
    for part in (model, model.get('backbone', {})):
        part.pop('init_cfg', None)
        part.pop('pretrained', None)


def import_slab_det(cfg: dict) -> None:
    """Adds slab_det to the ``custom_imports`` of a config, in place, so that mmdet finds our classes."""
    imports = cfg.get('custom_imports', {}).get('imports', [])
    imports = [imports] if isinstance(imports, str) else imports
    cfg['custom_imports'] = dict(imports=list(dict.fromkeys(['slab_det', *imports])), allow_failed_imports=False)
