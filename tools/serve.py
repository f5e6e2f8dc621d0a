"""Serves a detector over HTTP: see slab_det/cli/serve.py."""

from slab_det_command import run

if __name__ == '__main__':
    run('serve')
