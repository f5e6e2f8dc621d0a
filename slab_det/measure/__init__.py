"""Latency, cost and reports of detectors.

``figure``, which needs matplotlib, and ``untrained`` are imported by name.
"""

from slab_det.measure.cost import ModelCost, measure_cost
from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import (
    COMPILE_MODES,
    DTYPES,
    SCOPES,
    LatencyResult,
    describe_scope,
    keep_freed_memory,
    latency_table,
    measure_latency,
    repeat_ratios,
)
from slab_det.measure.report import (
    Report,
    ReportEntry,
    ap_from_metrics,
    describe_dataset,
    describe_model,
    markdown_table,
    read_report,
    update_report,
    write_report,
)

__all__ = [
    'COMPILE_MODES',
    'DTYPES',
    'SCOPES',
    'LatencyResult',
    'ModelCost',
    'Report',
    'ReportEntry',
    'ap_from_metrics',
    'describe_dataset',
    'describe_environment',
    'describe_model',
    'describe_scope',
    'keep_freed_memory',
    'latency_table',
    'markdown_table',
    'measure_cost',
    'measure_latency',
    'read_report',
    'repeat_ratios',
    'update_report',
    'write_report',
]
