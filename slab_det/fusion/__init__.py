"""Exact fusion of offline norms into neighbouring linear layers."""

from slab_det.fusion.folding import FusionError, FusionReport, NormFusion, check_statistics
from slab_det.fusion.save import FusedDetector, save_fused
from slab_det.fusion.verify import verify_fusion
from slab_det.norms.folds import CannotFold, Channels, Fold, Write, register_folds
