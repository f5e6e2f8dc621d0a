"""Checks what mmengine and mmdet load without asking us: DetInferencer, init_detector, stock backbones."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import mmengine.runner.checkpoint
from mmdet.models.backbones import PyramidVisionTransformer, SwinTransformer
from mmengine._strategy import BaseStrategy
from mmengine.logging import MMLogger
from mmengine.model import BaseModule, PretrainedInit
from torch import nn

from slab_det.backbones.base import check_init_cfg, load_init_cfg
from slab_det.checkpoints.detector import check_detector_checkpoint
from slab_det.norms import named_offline_norms

_load_checkpoint_to_model = mmengine.runner.checkpoint._load_checkpoint_to_model

# Whether what is being loaded may be a part: mmengine asks for strict=False wherever it loads.
_may_be_partial = ContextVar('_may_be_partial', default=False)


def install_checked_loading() -> None:
    """Makes mmengine check a checkpoint before it goes into a detector, print the report, and refuse a wrong one.

    The runner has :class:`slab_det.hooks.CheckedLoadHook` for that. Every weight must be there, but for a detector's
    own ``init_cfg`` and for FlexibleRunner, which may start a training from a part. ``mmdet.apis`` binds the function
    when it is imported: that must come after slab_det. mmdet's Swin and PVT load pretrained weights by key and skip
    what does not match; with one of our norms, whose keys are not LayerNorm's, they load as our backbones do.
    """
    mmengine.runner.checkpoint._load_checkpoint_to_model = _load_checked
    for owner, name in ((PretrainedInit, '__call__'), (BaseStrategy, 'load_model_state_dict')):
        if not hasattr(getattr(owner, name), '__wrapped__'):
            setattr(owner, name, _partial_allowed(getattr(owner, name)))
    for backbone in (SwinTransformer, PyramidVisionTransformer):
        if not hasattr(backbone.init_weights, '__wrapped__'):
            backbone.init_weights = _init_checked(backbone.init_weights)


def _load_checked(
    model: nn.Module,
    checkpoint: dict,
    strict: bool = False,
    logger: logging.Logger | str | None = None,
    revise_keys: Sequence[tuple[str, str]] = ((r'^module\.', ''),),
) -> dict:
    if hasattr(model, 'backbone'):
        # Renamed before the check, and so not again after it.
        _revise_keys(checkpoint, revise_keys)
        revise_keys = ()
        check_detector_checkpoint(model, checkpoint, complete=not _may_be_partial.get())
    return _load_checkpoint_to_model(model, checkpoint, strict, logger, revise_keys)


def _revise_keys(checkpoint: dict, revise_keys: Sequence[tuple[str, str]]) -> None:
    """Renames the weights of ``checkpoint`` as mmengine would, under ``state_dict``."""
    holder = next((name for name in ('state_dict', 'model') if isinstance(checkpoint.get(name), Mapping)), None)
    state = checkpoint[holder] if holder else checkpoint
    revised = OrderedDict()
    for key, value in state.items():
        for pattern, replacement in revise_keys:
            key = re.sub(pattern, replacement, str(key))
        revised[key] = value
    if hasattr(state, '_metadata'):
        revised._metadata = state._metadata
    checkpoint['state_dict'] = revised


def _partial_allowed(load: Callable) -> Callable:
    @wraps(load)
    def load_partial(*args: Any, **kwargs: Any) -> Any:
        token = _may_be_partial.set(True)
        try:
            return load(*args, **kwargs)
        finally:
            _may_be_partial.reset(token)

    return load_partial


def _init_checked(init_weights: Callable[[BaseModule], None]) -> Callable[[BaseModule], None]:
    """``init_weights`` of a stock backbone, which leaves pretrained weights for our norms to our loader."""

    @wraps(init_weights)
    def init_weights_checked(self: BaseModule) -> None:
        init_cfg = self.init_cfg
        if not init_cfg or init_cfg.get('type') != 'Pretrained' or not any(named_offline_norms(self)):
            init_weights(self)
            return
        check_init_cfg(self)
        self.init_cfg = None
        try:
            with _without_news_of_scratch():
                init_weights(self)
        finally:
            self.init_cfg = init_cfg
        load_init_cfg(self)

    return init_weights_checked


@contextmanager
def _without_news_of_scratch() -> Iterator[None]:
    """Keeps mmdet from logging that training starts from scratch just before the weights are loaded."""

    def is_other_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith('No pre-trained weights for')

    logger = MMLogger.get_current_instance()
    logger.addFilter(is_other_news)
    try:
        yield
    finally:
        logger.removeFilter(is_other_news)
