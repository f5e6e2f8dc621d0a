"""Measures AP on the validation images of a config, without a runner."""

from __future__ import annotations

import torch
from mmdet.evaluation import CocoMetric
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.runner import Runner
from torch import nn

from slab_det.common.modules import evaluating
from slab_det.measure.report_file import ap_from_metrics
from slab_det.runtime.registries import enter_scope


def evaluate(model: nn.Module, cfg: Config) -> dict[str, dict[str, float]]:
    """Runs a detector on the images of ``val_dataloader`` and evaluates it with ``val_evaluator``.

    Args:
        model: A detector.
        cfg: A config with ``val_dataloader`` and ``val_evaluator``.

    Returns:
        See :func:`slab_det.measure.report_file.ap_from_metrics`.
    """
    return evaluate_groups(model, cfg, 0)[0]


@torch.no_grad()
def evaluate_groups(model: nn.Module, cfg: Config, groups: int) -> tuple[dict, list[dict]]:
    """Evaluates a detector as :func:`evaluate` does, and also with each of some groups of the images left out.

    The spread of the APs with one group left out shows how far the choice of images moves AP (jackknife).

    Args:
        model, cfg: See :func:`evaluate`.
        groups: Number of groups, every ``groups``-th image in one; at most the number of images.

    Returns:
        What :func:`evaluate` returns, and the same with each group left out, of CocoMetrics alone. A kind of AP is
        missing where nothing was found. A single image makes no groups.
    """
    enter_scope(cfg)
    loader = Runner.build_dataloader(cfg.val_dataloader)
    evaluator = Evaluator(cfg.val_evaluator)
    evaluator.dataset_meta = loader.dataset.metainfo
    with evaluating(model):
        for batch in loader:
            evaluator.process(data_samples=model.test_step(batch), data_batch=batch)
    # ``evaluate`` empties the results.
    results = [(metric, [*metric.results]) for metric in evaluator.metrics if isinstance(metric, CocoMetric)]
    found = ap_from_metrics(evaluator.evaluate(len(loader.dataset)))
    groups = min([groups, *(len(images) for _, images in results)])
    parts = [{} for _ in range(groups if groups > 1 else 0)]
    for metric, images in results:
        # The files of the config hold what was found in all images.
        metric.outfile_prefix = None
        for group, part in enumerate(parts):
            kept = [image for i, image in enumerate(images) if i % groups != group]
            metric.img_ids = [truth['img_id'] for truth, _ in kept]
            part |= ap_from_metrics(metric.compute_metrics(kept))
    return found, parts
