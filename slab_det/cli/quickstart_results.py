"""AP, latency and pictures of the detectors that the quick start trained."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mmcv
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
from slab_det.measure.evaluate import evaluate
from slab_det.measure.figure import WIDTH, styled
from slab_det.measure.latency import format_ratio
from slab_det.measure.markdown import format_table
from slab_det.measure.report import ReportEntry, describe_dataset, describe_model, latency_scope

# (height, width) at which latency is measured: twice that of the images, so that the backbone takes most of the time.
SIZE = (320, 384)
NUM_DRAWN = 3  # images


def measure(
    cfg: Config, dataset: BaseDataset, files: Mapping[str, tuple[Path, Path]]
) -> tuple[dict[str, nn.Module], list[ReportEntry]]:
    """Measures AP and latency of each model, deployed, in turns in this process.

    Args:
        cfg: The config that the first model was trained with.
        dataset: Its validation images.
        files: Config and checkpoint of each model, by its name.

    Returns:
        The deployed models, and the entry of each.
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
    """Returns a Markdown table with one row per model, and below it what the numbers depend on.

    Args:
        entries: What :func:`measure` returned, LayerNorm first.
    """
    first, rows = entries[0], []
    for entry in entries:
        ap = [f'{100 * entry.ap[kind]["AP"]:.1f}' for kind in ('bbox', 'segm')]
        ratio = '1' if entry is first else format_ratio(entry.latency)
        norms_left = str(entry.latency['cost']['norms_left'])
        rows.append([entry.name, norms_left, *ap, f'{entry.latency["median_ms"]:.1f}', ratio])
    table = format_table(['model', 'norms left', 'box AP', 'mask AP', 'ms', f'ratio to {first.name}'], rows)
    return (
        f'{table}\n\nAP on {first.dataset["images"]} generated images, one seed. Latency: {latency_scope(first)}, in '
        'turns; ratio: median and quartiles over the rounds.\n'
    )


@styled
@torch.no_grad()
def objects_figure(models: Mapping[str, nn.Module], dataset: BaseDataset) -> Figure:
    """Draws the first images with the true objects, and with the objects that each model finds (score 0.5 or more)."""
    visualizer = DetLocalVisualizer()
    visualizer.dataset_meta = dataset.metainfo
    figure = Figure(figsize=(WIDTH, 1.25 * NUM_DRAWN))
    for index, row in enumerate(figure.subplots(NUM_DRAWN, 1 + len(models), squeeze=False)):
        batch = pseudo_collate([dataset[index]])
        found = [model.test_step(batch)[0] for model in models.values()]
        # Each of them has the true objects too.
        samples = zip(('truth', *models), (found[0], *found), strict=True)
        for axes, (name, sample) in zip(row, samples, strict=True):
            image = mmcv.imread(sample.img_path, channel_order='rgb')
            what = dict(draw_gt=name not in models, draw_pred=name in models, pred_score_thr=0.5)
            visualizer.add_datasample(name, image, sample, **what)
            axes.imshow(visualizer.get_image())
            axes.set_axis_off()
            axes.set_title(name if index == 0 else '')
    return figure
