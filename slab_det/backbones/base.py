"""What the backbones share: pretrained weights and frozen statistics."""

from __future__ import annotations

from collections.abc import Callable

from mmengine.logging import MMLogger
from mmengine.model import BaseModule
from torch import nn

from slab_det.checkpoints import load_pretrained
from slab_det.norms import named_offline_norms


def check_init_cfg(backbone: BaseModule) -> None:
    """Raises ValueError unless ``init_cfg`` is None or names a checkpoint, and nothing that would be ignored."""
    init_cfg = backbone.init_cfg
    if init_cfg is None:
        return
    takes = f"{type(backbone).__name__} takes init_cfg=None or dict(type='Pretrained', checkpoint=..., prefix=...)"
    if not isinstance(init_cfg, dict) or init_cfg.get('type') != 'Pretrained' or 'checkpoint' not in init_cfg:
        raise ValueError(f'{takes}, got {init_cfg}')
    unknown = sorted(init_cfg.keys() - {'type', 'checkpoint', 'prefix'})
    if unknown:
        raise ValueError(f'{takes}; remove {", ".join(unknown)}')


def load_init_cfg(backbone: BaseModule) -> None:
    """Loads the checkpoint that ``init_cfg`` names, if it names one."""
    init_cfg = backbone.init_cfg
    if init_cfg is not None:
        load_pretrained(backbone, init_cfg['checkpoint'], prefix=init_cfg.get('prefix') or '')


def init_backbone(backbone: BaseModule, init_from_scratch: Callable[[], None]) -> None:
    """The ``init_weights`` of a backbone with ``norm_eval``.

    Args:
        backbone: SLABSwin or SLABPVT.
        init_from_scratch: Gives its weights the values that they have before any training.

    Raises:
        ValueError: If ``init_cfg`` names no checkpoint, or something that would be ignored.
        CheckpointError: If the checkpoint does not fit.
    """
    check_init_cfg(backbone)
    init_from_scratch()
    load_init_cfg(backbone)
    if backbone.norm_eval:
        warn_of_live_statistics(backbone)
    backbone._is_init = True


def freeze_loaded_statistics(backbone: nn.Module) -> None:
    """Puts every norm whose statistics came from a checkpoint into eval mode."""
    for _, norm in named_offline_norms(backbone):
        if norm.statistics_loaded:
            norm.eval()


def warn_of_live_statistics(backbone: nn.Module) -> None:
    """Logs the norms that ``norm_eval`` could not freeze, for want of loaded statistics."""
    live = [name for name, norm in named_offline_norms(backbone) if not norm.statistics_loaded]
    if live:
        MMLogger.get_current_instance().warning(
            f'norm_eval: no statistics were loaded for {", ".join(live)}; they stay live'
        )
