"""Reads and writes report.json, the measurements of detectors, and formats them as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmengine.logging import MMLogger

from slab_det.common.config import detector_config, type_name
from slab_det.common.errors import SlabDetError
from slab_det.common.files import locked
from slab_det.common.record import Record, format_table, read_record, write_record
from slab_det.measure.latency import describe_scope

AP_KINDS = {'bbox': 'box AP', 'segm': 'mask AP', 'accuracy': 'top-1 accuracy'}
# Columns of Table 3 of the SLAB paper, with the suffixes of mmdet's CocoMetric.
AP_SUFFIXES = {'AP': '', 'AP50': '_50', 'AP75': '_75', 'APs': '_s', 'APm': '_m', 'APl': '_l'}
# Kind: {column: metric name of mmdet or, for accuracy, of mmpretrain}, the main column first.
METRICS = {
    **{kind: {name: f'{kind}_mAP{suffix}' for name, suffix in AP_SUFFIXES.items()} for kind in ('bbox', 'segm')},
    'accuracy': {'top1': 'top1', 'top5': 'top5'},
}


@dataclass(frozen=True)
class ReportEntry(Record):
    """A detector, fused or not, and its measurements: one row of a table.

    Attributes:
        name: Row label, with width and depths where the config gives them, for example 'SLAB-Swin-96x2262'.
        variant: 'unfused' or 'fused'.
        norm: Type of the norms during training, for example 'PRepBN'.
        attention: 'softmax', 'sla' or 'focused', or one per stage joined by '/'.
        detector: Type of the detector, for example 'MaskRCNN'.
        config: Path of the config.
        checkpoint: Path of the weights; None for random weights.
        dataset: ``ann_file`` and number of ``images`` that AP was measured on.
        ap: See :func:`ap_from_metrics`.
        latency: ``LatencyResult.to_dict()``.
        recalibration: Passes, residual and images of the recalibration.
        fusion: How each norm was fused, and the largest difference between fused and unfused outputs.
        training: ``seed``, ``iterations`` and ``batch_size``.
        environment: See :func:`slab_det.common.record.describe_environment`.
    """

    name: str
    variant: str
    norm: str
    attention: str
    detector: str
    config: str
    checkpoint: str | None = None
    dataset: dict | None = None
    ap: dict | None = None
    latency: dict | None = None
    recalibration: dict | None = None
    fusion: dict | None = None
    training: dict | None = None
    environment: dict | None = None


def describe_model(model_cfg: Mapping) -> dict[str, str]:
    """Reads ``name``, ``norm``, ``attention`` and ``detector`` from a model config, fused or not."""
    model_cfg = detector_config(model_cfg)
    backbone = model_cfg['backbone']
    # The ``model`` of a ConvertedModel is the backbone with the norms.
    backbone = {**backbone, **backbone.get('model', {})}
    stages = backbone.get('attention', 'softmax')
    kinds = [stages] if isinstance(stages, str) else list(stages)
    norm = type_name((backbone.get('norm_cfg') or {'type': 'LN'})['type'])
    norm = 'LN' if norm == 'LayerNorm' else norm  # torch's class, which mmcv's registry calls LN
    return {
        'name': _row_label(backbone, kinds, norm),
        'norm': norm,
        'attention': kinds[0] if len(set(kinds)) == 1 else '/'.join(kinds),
        'detector': type_name(model_cfg['type']),
    }


def form_suffix(deployed: bool, dtype: str) -> str:
    """Returns the suffix that gives a deployed or lower-precision model its own name, and so its own entry."""
    return '-deployed' * deployed + f'-{dtype}' * (dtype != 'float32')


def describe_dataset(dataset: object) -> dict:
    """Returns ``ann_file`` (or the folder of a classification dataset) and ``images``, the length with wrappers."""
    images = len(dataset)
    while hasattr(dataset, 'datasets') or hasattr(dataset, 'dataset'):
        dataset = dataset.datasets[0] if hasattr(dataset, 'datasets') else dataset.dataset
    # Classification datasets may have a folder instead, under a key of data_prefix that differs between libraries.
    ann_file = getattr(dataset, 'ann_file', '') or next(iter(getattr(dataset, 'data_prefix', {}).values()), '')
    return {'ann_file': str(ann_file), 'images': images}


def ap_from_metrics(metrics: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Extracts AP and accuracy from the runner's metrics, such as ``{'coco/bbox_mAP_50': 0.66}``.

    Returns:
        ``{'bbox': {'AP': …, 'AP50': …}, 'segm': {…}, 'accuracy': {…}}``, in [0, 1]. An AP of -1, which COCO gives to
        object sizes without ground truth, becomes None. Kinds whose main AP is -1 are left out.
    """
    by_name, found = {key.rpartition('/')[2]: value for key, value in metrics.items()}, {}
    for kind, columns in METRICS.items():
        values = {column: by_name.get(name, -1) for column, name in columns.items()}
        if values[main_column(kind)] >= 0:
            # mmpretrain logs per cent.
            maximum = 100 if kind == 'accuracy' else 1
            found[kind] = {column: float(value) / maximum if value >= 0 else None for column, value in values.items()}
    if metrics and not found:
        MMLogger.get_current_instance().warning(
            f'no COCO AP and no mmpretrain accuracy among the metrics {", ".join(metrics)}: give a CocoMetric, '
            'so that reports and tables show AP'
        )
    return found


def measured_kinds(entries: Iterable[ReportEntry]) -> list[str]:
    """Returns the AP kinds that at least one entry has, in the order of ``AP_KINDS``."""
    return [kind for kind in AP_KINDS if any(kind in (entry.ap or ()) for entry in entries)]


def format_ap(ap: Mapping | None, kind: str) -> str:
    """The main value of a kind of AP for one cell, times 100; a dash where it was not measured."""
    return f'{100 * ap[kind][main_column(kind)]:.1f}' if kind in (ap or ()) else '–'


def main_column(kind: str) -> str:
    """Returns the main column of an AP kind: 'AP' or 'top1'."""
    return next(iter(METRICS[kind]))


def read_report(path: str | Path) -> list[ReportEntry]:
    """Reads the entries of a report.json.

    Raises:
        SlabDetError: If the file is not a report.
    """
    try:
        return [ReportEntry(**entry) for entry in read_record(path)['entries']]
    except (ValueError, KeyError, TypeError) as error:
        raise SlabDetError(f'{path} is not a report.json of slab_det: {error!r}; measure again') from error


def write_report(path: str | Path, entries: Iterable[ReportEntry]) -> None:
    """Writes a report.json, in place of any other one."""
    with locked(path):
        _write(path, entries)


def _write(path: str | Path, entries: Iterable[ReportEntry]) -> None:
    write_record(path, dict(entries=[entry.to_dict() for entry in entries]))


def update_report(path: str | Path, *entries: ReportEntry) -> None:
    """Merges entries into a report.json; creates the file if it does not exist. Several processes may do so at once."""
    with locked(path):
        old = read_report(path) if Path(path).exists() else []
        _write(path, merge_entries([*old, *entries]))


def merge_entries(entries: Iterable[ReportEntry]) -> list[ReportEntry]:
    """Merges entries with the same name, detector, variant and checkpoint; later values replace earlier ones."""
    merged: dict[tuple, ReportEntry] = {}
    for entry in entries:
        key = (entry.name, entry.detector, entry.variant, Path(entry.checkpoint or entry.config).resolve())
        known = {name: value for name, value in vars(entry).items() if value is not None}
        merged[key] = replace(merged.get(key, entry), **known)
    return list(merged.values())


def markdown_table(entries: Sequence[ReportEntry]) -> str:
    """Returns a Markdown table with the columns of SLAB's Table 3, AP times 100.

    Numbers with the same mark were measured under the same conditions (device, dtype, threads, size, … or data and
    training). The conditions are listed below the table.
    """
    kinds = measured_kinds(entries)
    # Detectors always have the columns of Table 3.
    kinds = kinds if 'accuracy' in kinds else ['bbox', 'segm']
    conditions: list[str] = []

    def mark(text: str) -> str:
        if text not in conditions:
            conditions.append(text)
        return f' [{conditions.index(text) + 1}]'

    rows = []
    for entry in entries:
        ms = '–'
        if entry.latency:
            ms = f'{entry.latency["median_ms"]:.1f}' + mark(f'ms: median latency, {latency_scope(entry)}')
        row = [entry.name, entry.norm, entry.variant, ms]
        for kind in kinds:
            ap, cell = (entry.ap or {}).get(kind), '–'
            if ap:
                values = [ap.get(column) for column in METRICS[kind]]
                cell = ' / '.join('–' if value is None else f'{100 * value:.1f}' for value in values)
                cell += mark(f'{"accuracy" if kind == "accuracy" else "AP"} on {ap_scope(entry)}')
            row.append(cell)
        rows.append(row)
    titles = [
        ' / '.join([AP_KINDS[kind], *(name.removeprefix('AP') for name in [*METRICS[kind]][1:])]) for kind in kinds
    ]
    # Without blank lines Markdown joins the notes into one paragraph.
    notes = [f'\n[{i}] {text}' for i, text in enumerate(conditions, start=1)]
    notes += ['\nCompare only numbers with the same mark.'] if len(conditions) > 1 else []
    return '\n'.join([format_table(['model', 'norm', 'form', 'ms', *titles], rows), *notes]) + '\n'


def latency_scope(entry: ReportEntry) -> str:
    """Returns the conditions that two latencies must share to be compared, as one line."""
    return f'{describe_scope(entry.latency)}, {entry.latency["rounds"]} rounds after {entry.latency["warmup"]}'


def ap_scope(entry: ReportEntry) -> str:
    """Returns the data and training that two APs must share to be compared, as one line."""
    dataset = entry.dataset or {}
    ann_file = Path(dataset.get('ann_file') or 'unknown data')
    # Many datasets have an instances_val.json; its folder tells them apart.
    text = '/'.join(part for part in ann_file.parts[-3:] if part != 'annotations')
    text += f' ({dataset["images"]} images)' if 'images' in dataset else ''
    if entry.training:
        text += '; trained ' + ', '.join(f'{key.replace("_", " ")} {value}' for key, value in entry.training.items())
    return text


def _row_label(backbone: Mapping, kinds: Sequence[str], norm: str) -> str:
    """Returns the name that the papers give a backbone, such as 'SLAB-Swin-96x2262' or 'PVT-64x2222-PRepBN'."""
    label = type_name(backbone['type']).removeprefix('SLAB').replace('Transformer', '').replace('PyramidVision', 'PVT')
    label += 'V2' * bool(backbone.get('use_conv_ffn'))
    depths = backbone.get('depths', backbone.get('num_layers', ''))
    depths = ''.join(map(str, depths)) if isinstance(depths, Sequence) else str(depths)
    size = 'x'.join(filter(None, (str(backbone.get('embed_dims', '')), depths)))
    # TokenBN is BN in the papers.
    norm = 'BN' if norm == 'TokenBN' else norm
    norms = [] if norm == 'LN' else [norm]
    if 'focused' in kinds:
        label = f'Flatten-{label}'
    elif 'sla' in kinds and norm == 'PRepBN':
        # Simplified linear attention with PRepBN is SLAB.
        label, norms = f'SLAB-{label}', []
    elif 'sla' in kinds:
        label = f'SLA-{label}'
    if backbone.get('ffn_norm'):
        norms.append(f'FFN{norm}')
    return '-'.join(filter(None, (label, size, '+'.join(norms))))
