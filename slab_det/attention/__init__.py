"""Attention as mathematics over a geometry."""
