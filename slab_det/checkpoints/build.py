"""Builds the detector of a config without a runner, and loads its checkpoint."""

import copy
from pathlib import Path

from mmdet.registry import DATASETS, MODELS
from mmengine.config import Config
from mmengine.runner import load_state_dict, save_checkpoint
from torch import nn

from slab_det.checkpoints import LoadReport, check_detector_checkpoint, load_pretrained
from slab_det.runtime import read_checkpoint
from slab_det.runtime.config import detector_config
from slab_det.runtime.errors import CheckpointError, config_errors, name_some
from slab_det.runtime.scope import enter_scope


def build_detector(cfg: Config, checkpoint: str | None = None) -> nn.Module:
    """Builds ``cfg.model`` in eval mode on the CPU.

    Args:
        cfg: A config of a detector.
        checkpoint: All weights of the detector; None leaves random ones. ``init_cfg`` is not run, so nothing is
            downloaded.

    Returns:
        The detector, with its config as ``cfg``. With a checkpoint it has ``dataset_meta``: class names and palette of
        the checkpoint, or else the class names of the training set, or None.

    Raises:
        ConfigError: If the model cannot be built.
        CheckpointError: If the checkpoint is missing or does not fit the model.
    """
    enter_scope(cfg)
    with config_errors(cfg.filename or 'config'):
        # mmdet's DETRs write into their config, and what is written cannot be built again.
        model_cfg = copy.deepcopy(cfg.model)
        if 'data_preprocessor' in cfg:
            # As the runner does.
            model_cfg.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
        model = MODELS.build(model_cfg)
    model.eval()
    # As mmdet's init_detector leaves it.
    model.cfg = cfg
    if checkpoint is None:
        return model
    loaded = read_checkpoint(checkpoint)
    check_detector_checkpoint(model, loaded, checkpoint, complete=True)
    load_state_dict(model, loaded['state_dict'])
    meta = loaded.get('meta') or {}
    # mmdet 2 wrote class names and palette in capitals, directly into meta.
    found = {name.lower(): meta[name] for name in ('CLASSES', 'PALETTE') if meta.get(name) is not None}
    model.dataset_meta = meta.get('dataset_meta') or (found if 'classes' in found else _training_classes(model, cfg))
    return model


def _training_classes(model: nn.Module, cfg: Config) -> dict | None:
    """The class names of a config's training set, if they are as many as the heads of ``model`` have."""
    dataset = (cfg.get('train_dataloader') or {}).get('dataset') or {}
    while inner := dataset.get('dataset') or (dataset.get('datasets') or [None])[0]:
        dataset = inner
    kind = DATASETS.get(dataset['type']) if isinstance(dataset.get('type'), str) else dataset.get('type')
    metainfo = {**getattr(kind, 'METAINFO', {}), **(dataset.get('metainfo') or {})}
    classes = metainfo.get('classes')
    # An RPN has one.
    counts = [n for m in model.modules() if isinstance(n := getattr(m, 'num_classes', None), int)]
    return dict(classes=tuple(classes)) if classes and counts and len(classes) == max(counts) else None


def rewrite_as_native(cfg: Config, source: str, out: str | Path) -> LoadReport:
    """Writes pretrained weights in mmdet's layout, for the backbone of ``cfg``, into a file.

    Args:
        cfg: A config of a detector; only its backbone is built.
        source: A file, URL or ``timm://NAME`` that :func:`slab_det.load_pretrained` understands.
        out: The new file, ending in .pth, with the weights under ``state_dict``.

    Returns:
        What happened to every key.

    Raises:
        CheckpointError: If the weights do not fit, or do not fill the backbone: random ones are not written.
    """
    enter_scope(cfg)
    with config_errors(cfg.filename or 'config'):
        backbone = MODELS.build(detector_config(cfg.model).backbone)
    report = load_pretrained(backbone, source)
    if report.missing_unexpected:
        raise CheckpointError(
            f'{source} has nothing for {len(report.missing_unexpected)} weights of {type(backbone).__name__} '
            f'({name_some(report.missing_unexpected)}), and random ones are not written; give the config '
            'that the weights belong to'
        )
    save_checkpoint(dict(state_dict=backbone.state_dict()), str(out))
    return report
