"""Writes pretrained weights of a backbone, in whatever layout they are, as mmdet would have saved them."""

from __future__ import annotations

from pathlib import Path

from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import save_checkpoint

from slab_det.checkpoints.load import load_pretrained
from slab_det.checkpoints.report import LoadReport, name_some
from slab_det.runtime.errors import CheckpointError


def rewrite_as_native(cfg: Config, source: str, out: str | Path) -> LoadReport:
    """Writes the weights of the backbone of ``cfg`` with ``source`` loaded, under ``state_dict``.

    Args:
        cfg: A config of a detector; only its backbone is built.
        source: A file, URL or ``timm://NAME`` that :func:`slab_det.load_pretrained` understands.
        out: Where the weights go, ending in .pth.

    Returns:
        What became of every key.

    Raises:
        CheckpointError: If the weights do not fit, or do not fill the backbone: random ones are not written.
    """
    init_default_scope(cfg.get('default_scope', 'mmdet'))
    backbone = MODELS.build(cfg.model.backbone)
    try:
        report = load_pretrained(backbone, source)
    except FileNotFoundError as error:
        raise CheckpointError(f'checkpoint {source} not found') from error
    if report.missing_unexpected:
        raise CheckpointError(
            f'{source} has nothing for {len(report.missing_unexpected)} weights of {type(backbone).__name__} '
            f'({name_some(report.missing_unexpected)}), and random ones are not written; give a config whose backbone '
            'is that of the weights'
        )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(dict(state_dict=backbone.state_dict()), str(out))
    return report
