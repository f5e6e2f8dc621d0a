"""Detectors as ONNX files: export, parity, int8, runtimes. Needs the extra 'onnx'."""
from .errors import ExportError
from .exported_detector import ExportedDetector, paste_masks
from .graph import SCOPES, build_graph, export_onnx
from .parity import ParityCheck, check_parity, random_images
from .quantize import quantize_onnx
from .runtime import PRECISIONS, RUNTIMES, load_runtime

__all__ = ['PRECISIONS', 'RUNTIMES', 'SCOPES', 'ExportError', 'ExportedDetector', 'ParityCheck', 'build_graph',
           'check_parity', 'export_onnx', 'load_runtime', 'paste_masks', 'quantize_onnx', 'random_images']
