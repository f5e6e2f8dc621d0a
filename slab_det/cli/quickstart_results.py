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
from slab_det.checkpoints import is_fused
from slab_det.checkpoints.build import build_detector
from slab_det.cli.config import read_config
from slab_det.measure import ReportEntry, measure_latency
from slab_det.measure.evaluate import evaluate
from slab_det.measure.figure import WIDTH, styled
from slab_det.measure.report import ap_scope, describe_dataset, describe_model, form_suffix, latency_scope

SIZE = (160, 192)  # (height, width) of the images
NUM_DRAWN = 3  # images


def measure(
    cfg: Config, dataset: BaseDataset, files: Mapping[str, tuple[Path, Path]]
) -> tuple[dict[str, nn.Module], list[ReportEntry]]:
    """Measures AP and latency of each model, eager and deployed, in turns in this process.

    Args:
        cfg: The config that the first model was trained with.
        dataset: Its validation images.
        files: Config and checkpoint of each model, by its name.

    Returns:
        The eager models, and for each its eager entry, then its deployed one.
    """
    batch_size = cfg.train_dataloader.batch_size
    training = dict(seed=cfg.randomness.seed, iterations=cfg.train_cfg.max_iters, batch_size=batch_size)
    models, forms, entries = {}, {}, {}
    for name, (config, checkpoint) in files.items():
        description = describe_model(read_config(str(config)).model)
        models[name] = build_detector(read_config(str(config)), str(checkpoint))
        for deployed in (False, True):
            form = slab_det.deploy(models[name]) if deployed else models[name]
            described = description | {'name': name + form_suffix(deployed, 'float32')}
            forms[described['name']] = form
            entries[described['name']] = ReportEntry(
                **described,
                variant='fused' if is_fused(models[name]) else 'unfused',
                config=str(config),
                checkpoint=str(checkpoint),
                dataset=describe_dataset(dataset),
                training=training,
                ap=evaluate(form, cfg),
            )
    image = dataset.get_data_info(0)['img_path']
    results = measure_latency(forms, SIZE, rounds=50, warmup=10, image=image, cost=True, progress=True)
    return models, [replace(entries[name], latency=result.to_dict()) for name, result in results.items()]


def compare(entries: Sequence[ReportEntry]) -> str:
    """Returns a Markdown table with one row per model, and below it what the numbers depend on.

    Args:
        entries: What :func:`measure` returned, LayerNorm first.
    """
    forms, rows = ('eager', 'deployed'), []
    header = ['model', 'norms left', 'box AP', 'mask AP', *(f'{form}: ms (ratio)' for form in forms), 'form to take']
    moved = 0.0
    for built, deployed in zip(entries[::2], entries[1::2], strict=True):
        moved = max(moved, *(abs(deployed.ap[kind]['AP'] - values['AP']) for kind, values in built.ap.items()))
        times = [form.latency['median_ms'] for form in (built, deployed)]
        ratios = [time / first.latency['median_ms'] for time, first in zip(times, entries[:2], strict=True)]
        take = forms[times.index(min(times))]
        slower = [form for form, ratio in zip(forms, ratios, strict=True) if ratio >= 1.005]
        rows.append(
            [
                built.name,
                str(built.latency['cost']['norms_left']),
                *(f'{100 * built.ap[kind]["AP"]:.1f}' for kind in ('bbox', 'segm')),
                *(f'{time:.1f} ({ratio:.2f})' for time, ratio in zip(times, ratios, strict=True)),
                take + f'; slower than LayerNorm {" and ".join(slower)}' * bool(slower),
            ]
        )
    lines = [f'| {" | ".join(cells)} |' for cells in (header, ['---'] + ['---:'] * 5 + ['---'], *rows)]
    lines += ['', f'ms: median latency, {latency_scope(entries[0])}, in turns; ratio: to LayerNorm in the same form.']
    lines += ['', f'AP in eager mode, on {ap_scope(entries[0])}; deployed it moves by at most {100 * moved:.1f}.']
    return '\n'.join(lines) + '\n'


@torch.no_grad()
def draw_objects(models: Mapping[str, nn.Module], dataset: BaseDataset) -> list[dict[str, np.ndarray]]:
    """Draws the first images with the true objects, and with those that each model finds with a score of 0.5 or more.

    Returns:
        For each image the pictures, (H, W, 3) uint8 in RGB, by the name of the model, or 'truth'.
    """
    visualizer = DetLocalVisualizer()
    visualizer.dataset_meta = dataset.metainfo
    drawn = []
    for index in range(NUM_DRAWN):
        batch, panels = pseudo_collate([dataset[index]]), {}
        for name, model in models.items():
            (found,) = model.test_step(batch)
            image = mmcv.imread(found.img_path, channel_order='rgb')
            for panel, truth in (('truth', True), (name, False)):
                visualizer.add_datasample(panel, image, found, draw_gt=truth, draw_pred=not truth, pred_score_thr=0.5)
                panels[panel] = visualizer.get_image()
        drawn.append(panels)
    return drawn


@styled
def objects_figure(drawn: Sequence[Mapping[str, np.ndarray]]) -> Figure:
    """Draws the pictures that :func:`draw_objects` returned, one row per image."""
    figure = Figure(figsize=(WIDTH, 1.65 * len(drawn)))
    for row, panels in zip(figure.subplots(len(drawn), len(drawn[0]), squeeze=False), drawn, strict=True):
        for axes, (name, pixels) in zip(row, panels.items(), strict=True):
            axes.imshow(pixels)
            axes.set_axis_off()
            axes.set_title(name if panels is drawn[0] else '')
    return figure
