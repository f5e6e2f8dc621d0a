"""An export leaves other threads of its process alone, and stores what a data set says about itself."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from slab_det.backbones import SLABSwin
from slab_det.export import ExportError, export_onnx, load_runtime


def test_other_threads_see_no_change_of_torch_while_an_export_traces(small_detector, tmp_path, monkeypatch):
    model, original, forward, found = small_detector('faster_rcnn'), torch.Tensor.unflatten, SLABSwin.forward, []
    x = torch.zeros(2, 6)

    def observe() -> None:
        found.append((torch.Tensor.unflatten is original, x.unflatten(1, (2, 3)).grad_fn is None))
        with pytest.raises(RuntimeError, match='unflatten'):
            x.unflatten(1, (4, 2))

    def observed_forward(self, images):
        thread = threading.Thread(target=observe)
        thread.start()
        thread.join()
        return forward(self, images)

    monkeypatch.setattr(SLABSwin, 'forward', observed_forward)
    export_onnx(model, tmp_path / 'model.onnx', 'backbone')
    assert found and {*found} == {(True, True)}


def test_arrays_in_the_facts_about_a_data_set_become_lists(small_detector, tmp_path):
    model, file = small_detector('faster_rcnn'), tmp_path / 'model.onnx'
    # As OpenImages' RELATION_MATRIX.
    model.dataset_meta = dict(classes=('a', 'b'), RELATION_MATRIX=np.eye(2), count=np.int64(2), used={'b', 'a'})
    export_onnx(model, file, 'backbone')
    found = load_runtime(file).metadata['dataset_meta']
    assert found == dict(classes=['a', 'b'], RELATION_MATRIX=[[1, 0], [0, 1]], count=2, used=['a', 'b'])


def test_facts_that_no_file_can_hold_are_refused_before_the_trace(small_detector, tmp_path, monkeypatch):
    model = small_detector('faster_rcnn')
    model.dataset_meta = dict(classes=('a',), loader=object())
    monkeypatch.setattr(torch.onnx, 'export', lambda *args, **kwargs: pytest.fail('the model was traced'))
    with pytest.raises(ExportError, match='dataset_meta cannot be stored.*object'):
        export_onnx(model, tmp_path / 'model.onnx', 'backbone')


SIGNALS = """
import os, signal
from slab_det.export.int8_sums import largest_product
from slab_det.export.in_openvino import load

signal.signal(signal.SIGUSR1, lambda *_: print('handled'))
files = [load(largest_product(), threads=1) for _ in range(3)]
while files:
    # The oldest first, as a server does that replaces its files.
    del files[0]
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_signals_are_handled_after_files_of_openvino_are_released():
    pytest.importorskip('openvino')
    done = subprocess.run([sys.executable, '-c', SIGNALS], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith('handled\n'), (done.returncode, done.stderr[-1000:])
