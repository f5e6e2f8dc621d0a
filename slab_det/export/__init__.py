"""Detectors as ONNX files: export, comparison with PyTorch, int8 and runtimes. Needs the extra 'onnx'."""

from slab_det.common.errors import ExportError
from slab_det.export.exported_detector import ExportedDetector
from slab_det.export.loaded_file import load_runtime
from slab_det.export.onnx_file import EXPORT_SCOPES, build_graph, export_onnx
from slab_det.export.parity import ParityCheck, check_parity, random_images
from slab_det.export.quantize import quantize_onnx
from slab_det.families.masks import paste_masks

__all__ = [
    'EXPORT_SCOPES',
    'ExportError',
    'ExportedDetector',
    'ParityCheck',
    'build_graph',
    'check_parity',
    'export_onnx',
    'load_runtime',
    'paste_masks',
    'quantize_onnx',
    'random_images',
]
