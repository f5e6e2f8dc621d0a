"""Fast forms of a detector for inference: on a CPU, on a GPU, in ONNX Runtime and in OpenVINO."""

from slab_det.deployment.deploy import deploy, is_deployed
from slab_det.deployment.serve import ImageListError, ServedDetector, load_detector

__all__ = ['ImageListError', 'ServedDetector', 'deploy', 'is_deployed', 'load_detector']
