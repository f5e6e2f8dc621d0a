"""Measures detectors: latency, cost, AP and agreement; writes reports and pictures."""

from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import LatencyResult, latency_table, measure_latency
from slab_det.measure.report import ReportEntry
