"""report.json: AP and latency of unfused and fused detectors, in the one schema that hook and tools fill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from mmengine.fileio import put_text

from slab_det.measure.latency import describe_scope
from slab_det.runtime.config import type_name
from slab_det.runtime.errors import ReportError

SCHEMA = 1
VARIANTS = ('unfused', 'fused')
# Columns of Table 3 of the SLAB paper, with the suffixes of mmdet's CocoMetric.
AP_SUFFIXES = {'AP': '', 'AP50': '_50', 'AP75': '_75', 'APs': '_s', 'APm': '_m', 'APl': '_l'}
AP_KINDS = {'bbox': 'box', 'segm': 'mask'}
# The sizes of the papers' tables and of the configs: (family, width, depths).
SIZES = {
    ('Swin', 96, (2, 2, 6, 2)): 'T',
    ('Swin', 96, (2, 2, 18, 2)): 'S',
    ('Swin', 128, (2, 2, 18, 2)): 'B',
    ('Swin', 192, (2, 2, 18, 2)): 'L',
    ('PVT', 64, (2, 2, 2, 2)): 'T',
    ('PVT', 64, (3, 4, 6, 3)): 'S',
    ('PVT', 64, (3, 4, 18, 3)): 'M',
    ('PVT', 64, (3, 8, 27, 3)): 'L',
}


@dataclass(frozen=True)
class ReportEntry:
    """One row: a detector, fused or not, and what was measured of it.

    Attributes:
        name: Row label as in the papers, for example 'SLAB-Swin-T'.
        variant: 'unfused' or 'fused'.
        norm: Type of the norms it was trained with, for example 'PRepBN'.
        attention: 'softmax', 'sla' or 'focused', or one per stage joined by '/'.
        detector: Type of the detector, for example 'MaskRCNN'.
        config: Path of the config.
        checkpoint: Path of the weights; None where they were random.
        dataset: ``ann_file`` and number of ``images`` that AP was measured on.
        ap: ``{'bbox': {'AP': …, 'AP50': …, …}, 'segm': {…}}`` in [0, 1], None for sizes without objects.
        latency: ``LatencyResult.to_dict()``.
        recalibration: Passes, residual and images of the recalibration.
        fusion: Where each norm went, and the largest difference to the unfused outputs.
        training: ``seed``, ``iterations`` and ``batch_size``.
        environment: See :func:`slab_det.measure.environment.describe_environment`.
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

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Entries with the same key describe the same detector, seen by different tools."""
        return self.name, self.detector, self.variant, str(Path(self.checkpoint or self.config).resolve())

    def merged_with(self, other: ReportEntry) -> ReportEntry:
        """This entry with everything that ``other`` knows; ``other`` wins."""
        known = {item.name: getattr(other, item.name) for item in fields(other)}
        return replace(self, **{name: value for name, value in known.items() if value is not None})


@dataclass(frozen=True)
class Report:
    """The content of one report.json."""

    entries: list[ReportEntry] = field(default_factory=list)
    schema: int = SCHEMA


class PaperTable(NamedTuple):
    """One published table of detectors with an FPN on COCO val2017.

    Attributes:
        source: Paper and table.
        detector: Type of its detectors in mmdet.
        epochs: How long they were trained.
        latency: Device and rounds of its ``ms``; None where the table has no latency.
        rows: By row label ``{'ms': …, 'box': [AP, AP50, AP75, APs, APm, APl], 'mask': […]}``, AP times 100; UN prints
            AP alone. ``ms`` and ``mask`` are None where the table has none.
    """

    source: str
    detector: str
    epochs: int
    latency: str | None
    rows: dict[str, dict]

    def describe(self) -> str:
        """The source, and the conditions of its numbers."""
        latency = f'; ms: {self.latency}' if self.latency else ''
        return f'{self.source}: {self.detector}, {self.epochs} epochs, COCO val2017{latency}'


def read_paper_tables(path: str | Path) -> list[PaperTable]:
    """Reads published tables, as in ``benchmarks/paper_tables.json``."""
    return [PaperTable(**table) for table in json.loads(Path(path).read_text())]


def describe_model(model_cfg: Mapping) -> dict[str, str]:
    """``name``, ``norm``, ``attention`` and ``detector`` of a model config, fused or not.

    Types may be written in any way that mmengine builds: 'MaskRCNN', 'mmdet.MaskRCNN', or the class itself.
    """
    if type_name(model_cfg['type']) == 'FusedDetector':
        model_cfg = model_cfg['model']
    backbone = model_cfg['backbone']
    stages = backbone.get('attention', 'softmax')
    kinds = [stages] if isinstance(stages, str) else list(stages)
    norm = type_name((backbone.get('norm_cfg') or {'type': 'LN'})['type'])
    norm = 'LN' if norm == 'LayerNorm' else norm  # torch's class; mmcv's registry calls it LN
    return {
        'name': _row_label(backbone, kinds, norm),
        'norm': norm,
        'attention': kinds[0] if len(set(kinds)) == 1 else '/'.join(kinds),
        'detector': type_name(model_cfg['type']),
    }


def form_suffix(deployed: bool, dtype: str) -> str:
    """Suffix of a row label for forms other than the plain model in float32, so that each form has its own entry."""
    return '-deployed' * deployed + f'-{dtype}' * (dtype != 'float32')


def describe_dataset(dataset: object) -> dict:
    """``ann_file`` and number of ``images`` of a built dataset, through wrappers; of the first of several."""
    images = len(dataset)
    while hasattr(dataset, 'datasets') or hasattr(dataset, 'dataset'):
        dataset = dataset.datasets[0] if hasattr(dataset, 'datasets') else dataset.dataset
    return {'ann_file': str(getattr(dataset, 'ann_file', '')), 'images': images}


def ap_from_metrics(metrics: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Picks AP out of the runner's metrics, such as ``{'coco/bbox_mAP_50': 0.66}``.

    Returns:
        ``{'bbox': {'AP': …, 'AP50': …}, 'segm': {…}}`` for the kinds that were evaluated. COCO's -1, which says that no
        object has that size, becomes None.
    """
    by_name = {key.rpartition('/')[2]: value for key, value in metrics.items()}
    return {
        kind: {
            column: float(by_name[f'{kind}_mAP{suffix}']) if by_name.get(f'{kind}_mAP{suffix}', -1) >= 0 else None
            for column, suffix in AP_SUFFIXES.items()
        }
        for kind in AP_KINDS
        if f'{kind}_mAP' in by_name
    }


def read_report(path: str | Path) -> Report:
    """Reads and validates a report.json.

    Raises:
        ReportError: If the file is missing, is not JSON, or does not follow the schema; says where.
    """
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise ReportError(f'{path} not found') from error
    except ValueError as error:
        raise ReportError(f'{path} is not JSON: {error}') from error
    if not isinstance(content, dict) or content.get('schema') != SCHEMA:
        found = content.get('schema') if isinstance(content, dict) else type(content).__name__
        raise ReportError(f'{path}: expected an object with "schema": {SCHEMA}, found {found!r}')
    if not isinstance(content.get('entries'), list):
        raise ReportError(f'{path}: "entries" must be a list')
    return Report([_entry(item, f'{path}: entries[{i}]') for i, item in enumerate(content['entries'])])


def write_report(path: str | Path, report: Report) -> None:
    """Replaces a report.json in one step: readers see the old file or the new one, never half of it."""
    put_text(json.dumps(asdict(report), indent=1, allow_nan=False) + '\n', str(path))


def update_report(path: str | Path, *entries: ReportEntry) -> Report:
    """Merges entries into a report.json, which need not exist, and returns the whole.

    A new training run starts its file with :func:`write_report` instead, so that no number of the last run stays.
    """
    old = read_report(path).entries if Path(path).exists() else []
    report = Report(merge_entries([*old, *entries]))
    write_report(path, report)
    return report


def merge_entries(entries: Iterable[ReportEntry]) -> list[ReportEntry]:
    """One entry per key in order of appearance; later entries win field by field."""
    merged: dict[tuple, ReportEntry] = {}
    for entry in entries:
        merged[entry.key] = merged[entry.key].merged_with(entry) if entry.key in merged else entry
    return list(merged.values())


def markdown_table(entries: Sequence[ReportEntry], paper_tables: Sequence[PaperTable] = ()) -> str:
    """A table in the columns of SLAB's Table 3, with the scope of its numbers below it.

    Numbers of different scopes (device, dtype, threads, size, … or data and training) get different marks.

    Args:
        entries: The rows; AP is shown times 100.
        paper_tables: Published numbers to show for rows of the same name, in columns named as the papers'.
    """
    latency_notes = _Notes('L', [latency_scope(e) for e in entries if e.latency])
    ap_notes = _Notes('A', [ap_scope(e) for e in entries if e.ap])
    suffixes = ' / '.join(column.removeprefix('AP') or 'AP' for column in AP_SUFFIXES)
    header = ['model', 'norm', '', 'ms', *(f'{title} {suffixes}' for title in AP_KINDS.values())]
    rows = []
    for entry in entries:
        mark = ap_notes.mark(ap_scope(entry)) if entry.ap else ''
        rows.append(
            [
                entry.name,
                entry.norm,
                entry.variant,
                f'{entry.latency["median_ms"]:.1f}{latency_notes.mark(latency_scope(entry))}' if entry.latency else '–',
                *(_ap_cell(entry.ap[kind]) + mark if kind in (entry.ap or {}) else '–' for kind in AP_KINDS),
            ]
        )
    notes = [*latency_notes.lines('ms: median latency, '), *ap_notes.lines('AP on ')]
    if len(latency_notes) > 1:
        notes.append('Latencies with different marks were measured differently: do not compare them.')
    if paper_tables:
        header += ['paper: ms (V100)', *(f'paper: {title} {suffixes}' for title in AP_KINDS.values())]
        published = [
            [table for table in paper_tables if table.detector == entry.detector and entry.name in table.rows]
            for entry in entries
        ]
        paper_notes = _Notes('P', [table.describe() for tables in published for table in tables])
        for entry, row, tables in zip(entries, rows, published, strict=True):
            row += _paper_cells(entry.name, tables, paper_notes)
        notes += paper_notes.lines("The authors' numbers, not measured here: ")
    lines = [f'| {" | ".join(cells)} |' for cells in [header, ['---'] * len(header), *rows]]
    return '\n'.join([*lines, '', *notes]) + '\n'


def latency_scope(entry: ReportEntry) -> str:
    """What two entries must share for their latencies to be compared, as one line."""
    latency = entry.latency
    return f'{describe_scope(latency)}, {latency["rounds"]} rounds after {latency["warmup"]}'


def ap_scope(entry: ReportEntry) -> str:
    """What two entries must share for their APs to be compared, as one line."""
    dataset = entry.dataset or {}
    ann_file = Path(dataset.get('ann_file') or 'unknown data')
    # Every dataset calls its file instances_val.json: its folder tells them apart.
    text = '/'.join([*ann_file.parts[-3:-2], ann_file.name])
    text += f' ({dataset["images"]} images)' if 'images' in dataset else ''
    if entry.training:
        text += '; trained ' + ', '.join(f'{key.replace("_", " ")} {value}' for key, value in entry.training.items())
    return text


class _Notes:
    """Footnotes: one mark per distinct text, and none where all rows share one text."""

    def __init__(self, letter: str, texts: Iterable[str]) -> None:
        self._marks = {text: f'{letter}{i}' for i, text in enumerate(dict.fromkeys(texts), start=1)}

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self, text: str) -> str:
        return f' [{self._marks[text]}]' if len(self) > 1 else ''

    def lines(self, prefix: str) -> list[str]:
        # The blank line keeps Markdown from joining the notes into one paragraph.
        return [line for text in self._marks for line in (f'{self.mark(text).lstrip()} {prefix}{text}'.lstrip(), '')]


def _paper_cells(name: str, tables: Sequence[PaperTable], notes: _Notes) -> list[str]:
    """Latency, box AP and mask AP of one model in every table that has it, each with the mark of its table."""
    cells = []
    for column in ('ms', 'box', 'mask'):
        found = [(table.rows[name][column], notes.mark(table.describe())) for table in tables]
        values = [(value if isinstance(value, list) else [value], mark) for value, mark in found if value]
        cells.append('; '.join(' / '.join(f'{v:.1f}' for v in value) + mark for value, mark in values) or '–')
    return cells


def _row_label(backbone: Mapping, kinds: Sequence[str], norm: str) -> str:
    kind = type_name(backbone['type'])
    family = {
        'SLABSwin': 'Swin',
        'SwinTransformer': 'Swin',
        'SLABPVT': 'PVT',
        'PyramidVisionTransformer': 'PVT',
        'PyramidVisionTransformerV2': 'PVTv2',
    }.get(kind, kind)
    if family == 'PVT' and backbone.get('use_conv_ffn'):
        family = 'PVTv2'
    label = family
    if family == 'Swin':
        label += _size_suffix(family, backbone.get('embed_dims', 96), backbone.get('depths', (2, 2, 6, 2)))
    elif family in ('PVT', 'PVTv2'):
        label += _size_suffix(family, backbone.get('embed_dims', 64), backbone.get('num_layers', (3, 4, 6, 3)))
    # The papers call BatchNorm over tokens BN.
    norms = [] if norm == 'LN' else ['BN' if norm == 'TokenBN' else norm]
    if 'focused' in kinds:
        label = f'Flatten-{label}'
    elif 'sla' in kinds:
        # SLAB is simplified linear attention with PRepBN.
        label = f'{"SLAB" if norm == "PRepBN" else "SLA"}-{label}'
        norms = [name for name in norms if name != 'PRepBN']
    if backbone.get('ffn_norm'):
        norms.append(f'FFN{"BN" if norm == "TokenBN" else norm}')
    return '-'.join([label, '+'.join(norms)]) if norms else label


def _size_suffix(family: str, width: int, depths: Sequence[int]) -> str:
    """'-T', '-S', … for the sizes that have a letter; width and depths for any other."""
    return '-' + SIZES.get((family, width, tuple(depths)), f'{width}x{"".join(map(str, depths))}')


def _ap_cell(ap: Mapping[str, float | None]) -> str:
    return ' / '.join('–' if ap.get(column) is None else f'{100 * ap[column]:.1f}' for column in AP_SUFFIXES)


def _entry(item: object, where: str) -> ReportEntry:
    if not isinstance(item, dict):
        raise ReportError(f'{where} must be an object, found {type(item).__name__}')
    known = {entry_field.name for entry_field in fields(ReportEntry)}
    if unknown := sorted(set(item) - known):
        raise ReportError(f'{where} has unknown fields {", ".join(unknown)}')
    for name in ('name', 'variant', 'norm', 'attention', 'detector', 'config'):
        if not isinstance(item.get(name), str):
            raise ReportError(f'{where}.{name} must be a string, found {item.get(name)!r}')
    if item['variant'] not in VARIANTS:
        raise ReportError(f'{where}.variant must be one of {", ".join(VARIANTS)}, found {item["variant"]!r}')
    for name in sorted(known & set(item) - {'checkpoint'}):
        if not isinstance(item[name], str | dict | None):
            raise ReportError(f'{where}.{name} must be an object or null, found {item[name]!r}')
    for kind, values in (item.get('ap') or {}).items():
        if kind not in AP_KINDS or not isinstance(values, dict) or 'AP' not in values:
            raise ReportError(f'{where}.ap.{kind} must be bbox or segm with an "AP"')
    if item.get('latency') and not isinstance(item['latency'].get('median_ms'), int | float):
        raise ReportError(f'{where}.latency.median_ms must be a number')
    return ReportEntry(**item)
