"""Latency, cost and reports."""
