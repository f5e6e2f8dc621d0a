"""Conversion: replaces the norms of a trained detector, and writes configs that train it further."""

from slab_det.conversion.convert import ConversionReport, convert_norms
from slab_det.conversion.distill import DistilledDetector
from slab_det.conversion.finetune import convert_detector, write_tune_config
from slab_det.runtime.errors import ConversionError
