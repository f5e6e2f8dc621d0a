"""What the norms that an absorption keeps buy: agreement with the teacher, latency and AP over their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmengine.config import Config
from torch import nn

from slab_det.measure.evaluate import evaluate
from slab_det.measure.latency import LatencyResult, describe_scope, measure_latency
from slab_det.measure.report import AP_KINDS, main_column


@dataclass
class CurvePoint:
    """One absorbed detector, or the teacher, which keeps every norm.

    Attributes:
        name: Which it is.
        num_kept: How many LayerNorms it has.
        agreement: With the teacher, on held-out images; see :class:`AbsorptionReport`.
        latency: Measured in turns with that of the other points; None where it was not asked for.
        ap: See :func:`slab_det.measure.evaluate.evaluate`; None where it was not asked for.
    """

    name: str
    num_kept: int
    agreement: float | None
    latency: LatencyResult | None = None
    ap: dict | None = None

    def to_dict(self) -> dict:
        """The attributes, as JSON holds them."""
        return {**vars(self), 'latency': self.latency and self.latency.to_dict()}


def measure_curve(
    teacher: nn.Module,
    students: Mapping[str, nn.Module],
    rounds: int = 0,
    eval_cfg: Config | None = None,
    **latency_options,
) -> list[CurvePoint]:
    """Compares absorbed detectors with their teacher.

    Args:
        teacher: The LayerNorm detector.
        students: What :func:`slab_det.absorb` made of it, by names of their own.
        rounds: Timed rounds; 0 measures no latency.
        eval_cfg: A config with the data and the evaluator of a validation; None measures no AP.
        latency_options: Further arguments of :func:`slab_det.measure_latency`.

    Returns:
        A point for the teacher, then one for each student.
    """
    models = {'LayerNorm': teacher, **students}
    reports = {name: student.absorption_report for name, student in students.items()}
    num_norms = len(next(iter(reports.values())).norms)
    compared = all(report.agreement is not None for report in reports.values())
    points = [CurvePoint('LayerNorm', num_norms, 1.0 if compared else None)]
    points += [CurvePoint(name, len(report.kept), report.agreement) for name, report in reports.items()]
    if rounds:
        results = measure_latency(models, rounds=rounds, **latency_options)
        for point in points:
            point.latency = results[point.name]
    if eval_cfg is not None:
        for point in points:
            point.ap = evaluate(models[point.name], eval_cfg)
    return points


def curve_table(points: Sequence[CurvePoint]) -> str:
    """A Markdown table of points, the teacher first, with what the numbers depend on below it."""
    teacher = points[0]
    rows = [
        {
            'detector': point.name,
            'LayerNorms kept': str(point.num_kept),
            'agreement': '–' if point.agreement is None else f'{point.agreement:.3f}',
            **(_latency_cells(point.latency, teacher.latency) if point.latency else {}),
            **{AP_KINDS[kind]: f'{values[main_column(kind)]:.3f}' for kind, values in (point.ap or {}).items()},
        }
        for point in points
    ]
    lines = [f'| {" | ".join(cells)} |' for cells in (rows[0], *(row.values() for row in rows))]
    lines.insert(1, '|---|' + '---:|' * (len(rows[0]) - 1))
    if teacher.latency:
        lines += ['', f'{describe_scope(teacher.latency.to_dict())}, {teacher.latency.rounds} rounds interleaved']
    return '\n'.join(lines)


def _latency_cells(latency: LatencyResult, base: LatencyResult) -> dict[str, str]:
    return {'median ms': f'{latency.median_ms:.2f}', 'ratio': f'{latency.median_ms / base.median_ms:.3f}'}
