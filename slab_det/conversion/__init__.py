"""Conversion: the norms of a detector are replaced and its weights are kept."""

from slab_det.conversion.absorb import AbsorptionReport, NormAbsorption, StreamRefit, absorb
from slab_det.conversion.convert import ConversionError, ConversionReport, calibrate_norms, convert_norms
from slab_det.conversion.finetune import convert_detector, finetune_config

__all__ = [
    'AbsorptionReport',
    'ConversionError',
    'ConversionReport',
    'NormAbsorption',
    'StreamRefit',
    'absorb',
    'calibrate_norms',
    'convert_detector',
    'convert_norms',
    'finetune_config',
]
