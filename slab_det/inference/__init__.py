"""Fast forms of a detector for inference: on a CPU, on a GPU, in ONNX Runtime and in OpenVINO."""

from slab_det.common.modules import is_deployed
from slab_det.inference.deployment import deploy
from slab_det.inference.serving import ImageListError, ServedDetector, load_detector

__all__ = ['ImageListError', 'ServedDetector', 'deploy', 'is_deployed', 'load_detector']
