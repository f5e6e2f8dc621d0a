"""Measures detectors: latency, cost, AP and agreement; writes reports and pictures."""

from slab_det.measure.cost import ModelCost, measure_cost
from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import LatencyResult, latency_table, measure_latency
from slab_det.measure.report import ReportEntry, markdown_table, read_report, update_report

__all__ = [
    'LatencyResult',
    'ModelCost',
    'ReportEntry',
    'describe_environment',
    'latency_table',
    'markdown_table',
    'measure_cost',
    'measure_latency',
    'read_report',
    'update_report',
]
