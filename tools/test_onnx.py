"""Evaluates an exported detector with the flags of earlier versions: see slab_det/cli/test_onnx.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('test_onnx')
