"""AP, latency and pictures of the detectors that the quick start trained."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mmcv
import numpy as np
import torch
from matplotlib.figure import Figure
from mmdet.visualization import DetLocalVisualizer
from mmengine.config import Config
from mmengine.dataset import BaseDataset, pseudo_collate
from torch import nn

import slab_det
from slab_det.checkpoints import build_detector, is_fused
from slab_det.cli.config import read_config
from slab_det.common.record import format_ratio, format_table
from slab_det.measure.evaluate import evaluate
from slab_det.measure.figure import WIDTH, styled
from slab_det.measure.report_file import ReportEntry, describe_dataset, describe_model, format_ap, latency_scope

# (height, width) for latency: twice the size of the images, so that the backbone takes most of the time.
SIZE = (320, 384)
DRAWN_IMAGES = 3


def measure(
    cfg: Config, dataset: BaseDataset, files: Mapping[str, tuple[Path, Path]]
) -> tuple[dict[str, nn.Module], list[ReportEntry]]:
    """Deploys each model in this process, evaluates AP, and times all models in alternating rounds.

    Args:
        cfg: Training config of the first model.
        dataset: Validation dataset of ``cfg``.
        files: (config, checkpoint) of each model, by name.

    Returns:
        The deployed models by name, and one report entry per model.
    """
    batch_size = cfg.train_dataloader.batch_size
    training = dict(seed=cfg.randomness.seed, iterations=cfg.train_cfg.max_iters, batch_size=batch_size)
    models, entries = {}, []
    for name, (config, checkpoint) in files.items():
        model_cfg = read_config(str(config))
        model = build_detector(model_cfg, str(checkpoint))
        models[name] = slab_det.deploy(model)
        entry = ReportEntry(
            **describe_model(model_cfg.model) | {'name': name},
            variant='fused' if is_fused(model) else 'unfused',
            config=str(config),
            checkpoint=str(checkpoint),
            dataset=describe_dataset(dataset),
            training=training,
            ap=evaluate(models[name], cfg),
        )
        entries.append(entry)
    image = dataset.get_data_info(0)['img_path']
    results = slab_det.measure_latency(models, SIZE, warmup=10, image=image, cost=True, progress=True)
    return models, [replace(entry, latency=results[entry.name].to_dict()) for entry in entries]


def compare(entries: Sequence[ReportEntry]) -> str:
    """Returns a Markdown table with one row per model, and the measurement conditions below it.

    Args:
        entries: Entries from :func:`measure`, LayerNorm first.
    """
    first, rows = entries[0], []
    for entry in entries:
        ap, latency = [format_ap(entry.ap, kind) for kind in ('bbox', 'segm')], entry.latency
        ratio = '1' if entry is first else format_ratio(latency['ratio'], latency['ratio_quartiles'])
        norms_left = str(latency['cost']['norms_left'])
        rows.append([entry.name, norms_left, *ap, f'{latency["median_ms"]:.1f}', ratio])
    table = format_table(['model', 'norms left', 'box AP', 'mask AP', 'ms', f'ratio to {first.name}'], rows)
    return (
        f'{table}\n\nAP on {first.dataset["images"]} generated images, one seed. Latency: {latency_scope(first)}, in '
        'turns; ratio: median and quartiles over the rounds.\n'
    )


@torch.no_grad()
def draw_objects(models: Mapping[str, nn.Module], dataset: BaseDataset) -> list[dict[str, np.ndarray]]:
    """Draws the first images with the true objects, and with the objects that each model finds (score 0.5 or more).

    Returns:
        For each image a dict of drawings, (H, W, 3) uint8 in RGB, whose keys are 'truth' and the names of the models.
    """
    visualizer = DetLocalVisualizer()
    visualizer.dataset_meta = dataset.metainfo
    drawn = []
    for index in range(DRAWN_IMAGES):
        batch, panels = pseudo_collate([dataset[index]]), {}
        found = {name: model.test_step(batch)[0] for name, model in models.items()}
        # Every predicted sample also holds the true objects.
        for name, sample in {'truth': next(iter(found.values())), **found}.items():
            image, truth = mmcv.imread(sample.img_path, channel_order='rgb'), name == 'truth'
            visualizer.add_datasample(name, image, sample, draw_gt=truth, draw_pred=not truth, pred_score_thr=0.5)
            panels[name] = visualizer.get_image()
        drawn.append(panels)
    return drawn


@styled
def predictions_figure(drawn: Sequence[Mapping[str, np.ndarray]]) -> Figure:
    """Arranges the drawings of :func:`draw_objects` in a figure, one row per image."""
    figure = Figure(figsize=(WIDTH, 1.25 * len(drawn)))
    for row, panels in zip(figure.subplots(len(drawn), len(drawn[0]), squeeze=False), drawn, strict=True):
        for axes, (name, pixels) in zip(row, panels.items(), strict=True):
            axes.imshow(pixels)
            axes.set_axis_off()
            axes.set_title(name if panels is drawn[0] else '')
    return figure
