"""Builds the detector of a config outside a runner, for measuring and fusing."""

from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import load_state_dict
from torch import nn

from slab_det.checkpoints import check_detector_checkpoint
from slab_det.runtime import read_checkpoint
from slab_det.runtime.errors import CheckpointError, config_errors


def build_detector(cfg: Config, checkpoint: str | None = None) -> nn.Module:
    """Builds ``cfg.model`` in eval mode on the CPU.

    Args:
        cfg: A config of a detector.
        checkpoint: Weights to load, all of them; None leaves random ones. Nothing is downloaded: ``init_cfg``
            is not run.

    Returns:
        The detector, with ``dataset_meta`` (class names and palette), None where the checkpoint has none.

    Raises:
        ConfigError: If the model cannot be built.
        CheckpointError: If the checkpoint is missing or does not fit the model.
    """
    init_default_scope(cfg.get('default_scope', 'mmdet'))
    with config_errors(cfg.filename or 'config'):
        model = MODELS.build(cfg.model)
    model.eval()
    if checkpoint is None:
        return model
    try:
        loaded = read_checkpoint(checkpoint)
    except FileNotFoundError as error:
        raise CheckpointError(f'checkpoint {checkpoint} not found') from error
    check_detector_checkpoint(model, loaded, checkpoint, complete=True)
    load_state_dict(model, loaded['state_dict'])
    model.dataset_meta = _dataset_meta(loaded.get('meta') or {})
    return model


def _dataset_meta(meta: dict) -> dict | None:
    """Class names and palette as mmdet 3 stores them; mmdet 2 had them in capitals, at the top."""
    if meta.get('dataset_meta'):
        return meta['dataset_meta']
    found = {name.lower(): meta[name] for name in ('CLASSES', 'PALETTE') if meta.get(name) is not None}
    return found if 'classes' in found else None


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`slab_det.fuse` removed norms of this model, now or when its checkpoint was written."""
    report = getattr(model, 'fusion_report', None)
    return report is not None and any(norm.fate != 'kept' for norm in report.norms)


def is_deployed(model: nn.Module) -> bool:
    """Whether the model is what ``slab_det.deploy`` returned."""
    return getattr(model, 'deployed', False)
