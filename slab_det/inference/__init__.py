"""Fast forms of a detector for inference: on a CPU, on a GPU, in ONNX Runtime and in OpenVINO."""

from slab_det.inference.serving import ImageListError, ServedDetector, load_detector
from slab_det.runtime.modes import is_deployed

__all__ = ['ImageListError', 'ServedDetector', 'is_deployed', 'load_detector']
