"""Writes a fused detector as a checkpoint and a config, and builds a fused detector from such a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict
from mmengine.runner.checkpoint import get_state_dict, weights_to_cpu
from torch import nn

import slab_det
from slab_det.backbones.adopt import adopt
from slab_det.common.config import (
    add_imports,
    detector_config,
    drop_pretrained,
    merge_changes,
    to_values,
    type_name,
)
from slab_det.fusion.channels import resize_channels
from slab_det.fusion.folding import NormFusion, apply_folds
from slab_det.norms import set_gamma
from slab_det.runtime.run_folder import save_with_config

# Keys that only training reads.
TRAINING_KEYS = (
    'train_dataloader train_pipeline train_cfg optim_wrapper param_scheduler auto_scale_lr custom_hooks load_from '
    'resume work_dir launcher'
).split()


@MODELS.register_module()
def FusedDetector(  # noqa: N802 (a config's type)
    model: dict,
    folds: Sequence[dict],
    channels: dict[str, int] | None = None,
    **changes: dict,
) -> nn.Module:
    """Builds ``model``, removes its norms and hidden channels; the weights come from a checkpoint.

    Args:
        model: The config of the unfused detector. Its pretrained weights are not loaded.
        folds: The outcome for each norm, as :func:`save_fused` writes it.
        channels: Number of hidden channels of each pruned unit, by its name: ``channels`` of a
            :class:`~slab_det.fusion.FusionReport`.
        **changes: Merged into ``model``, so that options for the unfused config, such as ``model.test_cfg``, work here.

    Returns:
        The detector itself, not a wrapper, so its state-dict keys have no prefix. Loading weights that are unfused,
        incomplete or from another model raises CheckpointError.

    Raises:
        FusionError: If ``folds`` or ``channels`` belong to another model.
    """
    model = merge_changes(model, **changes)
    drop_pretrained(model)
    detector = MODELS.build(model)
    set_gamma(detector, 0.0)
    detector.eval()  # no chaining: the eval() of mmdet's backbones returns None
    adopt(detector)
    apply_folds(detector, [NormFusion(**fold) for fold in folds])
    resize_channels(detector, channels or {})
    detector.fusion_report.channels.update(channels or {})
    return detector


def _fused_config(cfg: Config, folds: list[dict], channels: dict[str, int]) -> Config:
    values = {key: value for key, value in to_values(cfg).items() if key not in TRAINING_KEYS}
    # Only training needs the teacher of a DistilledDetector. The new ``folds`` and ``channels`` include those of an
    # earlier fusion.
    values['model'] = ConfigDict(detector_config(values['model'])).to_dict()
    drop_pretrained(values['model'])
    if 'data_preprocessor' in values:
        # The runner would pass a data_preprocessor outside the model to FusedDetector.
        values['model'].setdefault('data_preprocessor', values.pop('data_preprocessor'))
    if type_name(values['model'].get('data_preprocessor', {}).get('type', '')) == 'DetDataPreprocessor':
        values['model']['data_preprocessor']['type'] = 'CheckedDataPreprocessor'
    # 'mmdet.' is for configs with another default scope; mmdet's init_detector reads the key `backbone`.
    values['model'] = dict(type='mmdet.FusedDetector', model=values['model'], folds=folds, backbone={})
    if channels:
        values['model']['channels'] = channels
    # mmdet finds slab_det's classes then.
    add_imports(values, 'slab_det')
    return Config(values)


def save_fused(model: nn.Module, cfg: Config, path: str | Path, dataset_meta: dict | None = None) -> tuple[Path, Path]:
    """Writes a fused detector to ``path``, and its config to ``<stem>_config.py``, for all tools and DetInferencer.

    Args:
        model: A detector that :func:`slab_det.fuse` returned.
        cfg: The config of the unfused detector.
        path: The checkpoint's file name, ending in .pth.
        dataset_meta: Class names and palette, for DetInferencer.

    Returns:
        The paths of the checkpoint and of the config.
    """
    folds = [fusion.to_dict() for fusion in model.fusion_report.norms]
    fused_cfg = _fused_config(cfg, folds, model.fusion_report.channels)
    meta = dict(cfg=fused_cfg.pretty_text, fused=True, folds=folds, slab_det_version=slab_det.__version__)
    if dataset_meta is not None:
        meta['dataset_meta'] = dataset_meta
    return save_with_config(dict(meta=meta, state_dict=weights_to_cpu(get_state_dict(model))), fused_cfg, path)
