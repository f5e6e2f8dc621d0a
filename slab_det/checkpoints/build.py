"""Builds the detector of a config without a runner, and loads its checkpoint."""

import copy
from pathlib import Path

from mmdet.registry import DATASETS, MODELS
from mmengine.config import Config
from mmengine.runner import load_state_dict, save_checkpoint
from torch import nn

from slab_det.checkpoints.load import check_detector_checkpoint, load_pretrained
from slab_det.checkpoints.load_report import LoadReport
from slab_det.common.config import detector_config, walk_datasets
from slab_det.common.errors import config_errors
from slab_det.runtime import read_checkpoint
from slab_det.runtime.registries import enter_scope


def build_detector(cfg: Config, checkpoint: str | None = None) -> nn.Module:
    """Builds ``cfg.model`` in eval mode on the CPU.

    Args:
        cfg: A config of a detector.
        checkpoint: File with all weights of the detector; None leaves them random. ``init_cfg`` is not run, so nothing
            is downloaded.

    Returns:
        The detector, with its config as ``cfg``. A checkpoint also gives it ``dataset_meta``: the class names and
        palette of the checkpoint, else the class names of the training set, else None.

    Raises:
        ConfigError: If the model cannot be built.
        CheckpointError: If the checkpoint is missing or does not fit the model.
    """
    enter_scope(cfg)
    with config_errors(cfg.filename or 'config'):
        # mmdet's DETRs change their config while they are built, and cannot be built from the changed one.
        model_cfg = copy.deepcopy(cfg.model)
        if 'data_preprocessor' in cfg:
            # The runner adds it to the model too.
            model_cfg.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
        model = MODELS.build(model_cfg)
    model.eval()
    # mmdet's inference functions read it.
    model.cfg = cfg
    if checkpoint is None:
        return model
    loaded = read_checkpoint(checkpoint)
    check_detector_checkpoint(model, loaded, checkpoint).check_complete()
    load_state_dict(model, loaded['state_dict'])
    meta = loaded.get('meta') or {}
    # mmdet 2 stored class names and palette as meta['CLASSES'] and meta['PALETTE'].
    found = {name.lower(): meta[name] for name in ('CLASSES', 'PALETTE') if meta.get(name) is not None}
    model.dataset_meta = meta.get('dataset_meta') or (found if 'classes' in found else _training_classes(model, cfg))
    return model


def _training_classes(model: nn.Module, cfg: Config) -> dict | None:
    """The class names of the training set; None if the heads of ``model`` have another number of classes."""
    if not cfg.get('train_dataloader'):
        return None
    *_, dataset = walk_datasets(cfg.train_dataloader.dataset)
    kind = DATASETS.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    classes = {**getattr(kind, 'METAINFO', {}), **(dataset.get('metainfo') or {})}.get('classes')
    # An RPN has num_classes = 1.
    counts = [n for m in model.modules() if isinstance(n := getattr(m, 'num_classes', None), int)]
    return dict(classes=tuple(classes)) if classes and counts and len(classes) == max(counts) else None


def rewrite_as_native(cfg: Config, source: str, out: str | Path) -> LoadReport:
    """Converts pretrained weights to mmdet's layout, for the backbone of ``cfg``, and saves them.

    Args:
        cfg: A config of a detector; only its backbone is built.
        source: A file, URL or ``timm://NAME`` that :func:`slab_det.load_pretrained` understands.
        out: The new file, ending in .pth, with the weights under ``state_dict``.

    Returns:
        What happened to every key.

    Raises:
        CheckpointError: If weights do not fit the backbone or are missing.
    """
    enter_scope(cfg)
    with config_errors(cfg.filename or 'config'):
        backbone = MODELS.build(detector_config(cfg.model).backbone)
    report = load_pretrained(backbone, source)
    report.check_complete()
    save_checkpoint(dict(state_dict=backbone.state_dict()), str(out))
    return report
