"""Absorption: replaces the LayerNorms of a trained detector by affine maps inside its linear layers, without labels."""

from slab_det.absorption.absorption_report import AbsorptionReport, NormAbsorption

__all__ = ['AbsorptionReport', 'NormAbsorption']
