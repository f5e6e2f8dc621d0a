"""Writes a fused detector: a checkpoint, and the config that rebuilds it."""

from __future__ import annotations

import copy
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import save_checkpoint
from mmengine.runner.checkpoint import get_state_dict, weights_to_cpu
from torch import nn

import slab_det
from slab_det.runtime.config import drop_pretrained, import_slab_det

# What only training reads. The rest of the config serves the fused model too.
TRAINING_KEYS = (
    'train_dataloader',
    'train_pipeline',
    'train_cfg',
    'optim_wrapper',
    'param_scheduler',
    'auto_scale_lr',
    'custom_hooks',
    'load_from',
    'work_dir',
    'launcher',
)


def fused_config(cfg: Config) -> Config:
    """The config of the fused detector, for tools/test.py, tools/latency.py and DetInferencer.

    Args:
        cfg: The config that the unfused detector was trained with.
    """
    values = {key: value for key, value in copy.deepcopy(cfg).to_dict().items() if key not in TRAINING_KEYS}
    drop_pretrained(values['model'])
    if 'data_preprocessor' in values:
        # The runner would hand it to FusedDetector.
        values['model'].setdefault('data_preprocessor', values.pop('data_preprocessor'))
    values['model'] = dict(type='FusedDetector', model=values['model'])
    import_slab_det(values)
    values['resume'] = False
    return Config(values)


def save_fused(model: nn.Module, cfg: Config, path: str | Path, dataset_meta: dict | None = None) -> tuple[Path, Path]:
    """Writes ``path`` and, beside it, ``<stem>_config.py``.

    Args:
        model: A detector that :func:`slab_det.fuse` returned.
        cfg: The config of the unfused detector.
        path: The checkpoint's file name, ending in .pth.
        dataset_meta: Class names and palette, for DetInferencer.

    Returns:
        The checkpoint's and the config's path.
    """
    path = Path(path)
    config_path = path.with_name(f'{path.stem}_config.py')
    fused_cfg = fused_config(cfg)
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = dict(cfg=fused_cfg.pretty_text, fused=True, slab_det_version=slab_det.__version__)
    if dataset_meta is not None:
        meta['dataset_meta'] = dataset_meta
    fused_cfg.dump(config_path)
    save_checkpoint(dict(meta=meta, state_dict=weights_to_cpu(get_state_dict(model))), str(path))
    return path, config_path
