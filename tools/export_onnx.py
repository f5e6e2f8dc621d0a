"""Exports a detector to ONNX: see slab_det/cli/export_onnx.py."""

from slab_det.cli.export_onnx import main

if __name__ == '__main__':
    main()
