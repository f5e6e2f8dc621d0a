"""The form of a detector that ships: fused weights, the fastest layout for its device, half precision."""

from slab_det.deployment.deploy import deploy, is_deployed, warm
from slab_det.deployment.serve import ImageListError, ServedDetector, load_detector

__all__ = ['ImageListError', 'ServedDetector', 'deploy', 'is_deployed', 'load_detector', 'warm']
