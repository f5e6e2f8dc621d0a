"""Measures detectors: latency, cost, AP and its loss; writes reports and pictures."""
