"""Evaluates an exported detector: see slab_det/cli/test_onnx.py."""

from slab_det.cli.test_onnx import main

if __name__ == '__main__':
    main()
