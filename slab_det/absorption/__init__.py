"""Absorption: the LayerNorms of a trained detector go into its linear layers, without training and without labels."""

from slab_det.absorption.absorb import absorb
from slab_det.absorption.report import AbsorptionReport, NormAbsorption

__all__ = ['AbsorptionReport', 'NormAbsorption', 'absorb']
