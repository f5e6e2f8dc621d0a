"""Conversion: replaces the norms of a model, and trains an absorbed detector towards its teacher."""

from slab_det.common.errors import ConversionError
from slab_det.conversion.convert import ConversionReport, convert_norms
from slab_det.conversion.distill import DistilledDetector
from slab_det.conversion.tune_config import write_tune_config
