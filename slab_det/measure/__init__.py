"""Measures detectors: latency, cost, AP and agreement; writes reports and pictures."""
