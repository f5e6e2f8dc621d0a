"""Exports a detector to ONNX: see slab_det/cli/export_onnx.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('export_onnx')
