"""Detectors whose norms are replaced and whose weights are kept."""
