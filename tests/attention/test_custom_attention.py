"""Exports an attention that is defined outside the package; docs/extend.md trains and deploys one."""

import onnx
import pytest
from torch import nn

from slab_det.attention import WINDOW_ATTENTIONS, WindowAttention, repeat_windows
from slab_det.export import check_parity, export_onnx, load_runtime, random_images


class GatedAttention(WindowAttention):
    """``softmax(gate(q) k + mask) v``, where ``gate`` is a linear layer on the queries of a head."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = nn.Linear(self.head_dims, self.head_dims)

    def mix(self, q, k, v, geometry):
        logits, mask = self.gate(q) @ k.transpose(-2, -1), geometry.attention_mask(q.dtype)
        if mask is not None:
            logits = logits + repeat_windows(mask[:, None], len(logits))
        return logits.softmax(-1) @ v


@pytest.fixture
def detector(monkeypatch, small_detector):
    monkeypatch.setitem(WINDOW_ATTENTIONS, 'gated', GatedAttention)
    return small_detector(attention='gated')


def test_custom_attention_exports_to_onnx(detector, tmp_path):
    export_onnx(detector, tmp_path / 'model.onnx', 'backbone')
    operators = {node.op_type for node in onnx.load(tmp_path / 'model.onnx').graph.node}
    assert 'Softmax' in operators and 'LayerNormalization' not in operators
    sizes = [(64, 96), (131, 75)]
    checks = check_parity(detector, load_runtime(tmp_path / 'model.onnx', threads=1), random_images(sizes))
    assert [check.what for check in checks] == ['64x96', '131x75']
