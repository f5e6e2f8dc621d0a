"""Measures AP on the validation images of a config, without a runner."""

from __future__ import annotations

import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.runner import Runner
from torch import nn

from slab_det.measure.report_file import ap_from_metrics
from slab_det.runtime.modes import evaluating
from slab_det.runtime.registries import enter_scope


@torch.no_grad()
def evaluate(model: nn.Module, cfg: Config) -> dict[str, dict[str, float]]:
    """Runs a detector on the images of ``val_dataloader`` and evaluates it with ``val_evaluator``.

    Args:
        model: A detector.
        cfg: A config with ``val_dataloader`` and ``val_evaluator``.

    Returns:
        See :func:`slab_det.measure.report_file.ap_from_metrics`.
    """
    enter_scope(cfg)
    loader = Runner.build_dataloader(cfg.val_dataloader)
    evaluator = Evaluator(cfg.val_evaluator)
    evaluator.dataset_meta = loader.dataset.metainfo
    with evaluating(model):
        for batch in loader:
            evaluator.process(data_samples=model.test_step(batch), data_batch=batch)
    return ap_from_metrics(evaluator.evaluate(len(loader.dataset)))
