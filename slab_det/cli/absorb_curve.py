"""Compares absorbed detectors with their teacher: agreement, latency and AP over the number of LayerNorms kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmengine.config import Config
from torch import nn

from slab_det.measure.evaluate import evaluate
from slab_det.measure.latency import describe_scope, format_ratio, measure_latency
from slab_det.measure.markdown import format_table
from slab_det.measure.report import AP_KINDS, main_column


def measure_curve(
    teacher: nn.Module,
    students: Mapping[str, nn.Module],
    rounds: int = 0,
    eval_cfg: Config | None = None,
    **latency_options,
) -> list[dict]:
    """Measures a teacher and its students.

    Args:
        teacher: The LayerNorm detector.
        students: Models that :func:`slab_det.absorb` made of it, by names of their own.
        rounds: Timed rounds; 0 measures no latency.
        eval_cfg: A config with the data and the evaluator of a validation; None measures no AP.
        latency_options: Further arguments of :func:`slab_det.measure_latency`.

    Returns:
        A dict for the teacher and one for each student: its name, how many LayerNorms it keeps (num_kept), its
        agreement with the teacher, its latency (a ``LatencyResult``) and its AP as
        :func:`slab_det.measure.evaluate.evaluate` returns it. What was not measured is None.
    """
    models = {'teacher': teacher, **students}
    reports = {name: student.absorption_report for name, student in students.items()}
    latencies = measure_latency(models, rounds=rounds, **latency_options) if rounds else {}
    compared = all(report.agreement is not None for report in reports.values())
    counts = {'teacher': len(next(iter(reports.values())).norms), **{k: len(r.kept) for k, r in reports.items()}}
    agreements = {'teacher': 1.0 if compared else None, **{name: r.agreement for name, r in reports.items()}}
    return [
        dict(
            name=name,
            num_kept=counts[name],
            agreement=agreements[name],
            latency=latencies.get(name),
            ap=None if eval_cfg is None else evaluate(model, eval_cfg),
        )
        for name, model in models.items()
    ]


def curve_table(points: Sequence[dict]) -> str:
    """A Markdown table of points, the teacher first, with what the numbers depend on below it."""
    base = points[0]['latency']
    rows = []
    for point in points:
        latency, ap = point['latency'], point['ap'] or {}
        row = {
            'detector': point['name'],
            'LayerNorms kept': str(point['num_kept']),
            'agreement': '–' if point['agreement'] is None else f'{point["agreement"]:.3f}',
        }
        if latency:
            row['median ms'] = f'{latency.median_ms:.2f}'
            row['ratio (quartiles)'] = format_ratio(latency.to_dict())
        rows.append(row | {AP_KINDS[kind]: f'{100 * values[main_column(kind)]:.1f}' for kind, values in ap.items()})
    table = format_table([*rows[0]], [[*row.values()] for row in rows])
    return f'{table}\n\n{describe_scope(base.to_dict())}, {base.rounds} rounds interleaved' if base else table
