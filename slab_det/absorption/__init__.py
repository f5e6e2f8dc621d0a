"""Absorption: removes hidden channels and, if asked, LayerNorms of a trained detector, without labels or training."""

from slab_det.absorption.absorption_report import AbsorptionReport, ChannelAbsorption, NormAbsorption

__all__ = ['AbsorptionReport', 'ChannelAbsorption', 'NormAbsorption']
