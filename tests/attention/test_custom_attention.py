"""An attention defined outside the package is fused, deployed in tiles and exported by its one definition."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from conftest import relative_difference
from torch import nn

import slab_det
from slab_det.attention import WINDOW_ATTENTIONS, WindowAttention, repeat_windows
from slab_det.deployment.cpu import tiles
from slab_det.deployment.cpu.blocks import TiledWindowAttention
from slab_det.deployment.export import build_graph, check_parity, export_onnx, load_runtime, random_images
from slab_det.norms import OfflineNorm


# docs/extend.md shows this class, and trains it.
class CosineAttention(WindowAttention):
    """``softmax(s cos(q, k) + mask) v`` per head, with a learned s (Swin V2, Liu et al., CVPR 2022)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sharpness = nn.Parameter(torch.full((self.num_heads, 1, 1), 10.0))

    def mix(self, q, k, v, geometry):
        logits = self.sharpness * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1))
        mask = geometry.attention_mask(q.dtype)
        if mask is not None:  # (windows of a map, N, N)
            logits = logits + repeat_windows(mask[:, None], len(logits))
        return logits.softmax(-1) @ v


@pytest.fixture
def cosine(monkeypatch):
    monkeypatch.setitem(WINDOW_ATTENTIONS, 'cosine', CosineAttention)
    return dict(attention='cosine', norm_cfg=dict(type='PRepBN'), embed_dims=8, num_heads=(1, 2, 2, 4))


@torch.no_grad()
def test_fuses_and_deploys(cosine, small_detector, monkeypatch):
    monkeypatch.setattr(tiles, 'TILE_TOKENS', 3 * 49)
    backbone = small_detector(**cosine).backbone.double()
    fused = slab_det.fuse(backbone)
    deployed = slab_det.deploy(fused)
    # Its padding tokens keep the bias from before the fold, and its norms are gone.
    assert not [module for module in fused.stages.modules() if isinstance(module, OfflineNorm)]
    assert sum(isinstance(module, TiledWindowAttention) for module in deployed.modules()) == 6
    images = torch.randn(2, 3, 75, 90, dtype=torch.double)
    for form in (fused, deployed):
        for out, expected in zip(form(images), backbone(images), strict=True):
            torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


class GatedAttention(CosineAttention):
    """Has a layer of its own, which reads the heads of windows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = nn.Linear(self.head_dims, self.head_dims)

    def mix(self, q, k, v, geometry):
        return super().mix(self.gate(q), k, v, geometry)


@torch.no_grad()
def test_a_layer_inside_mix_reads_every_window_in_an_exported_graph(cosine, small_detector, monkeypatch):
    monkeypatch.setitem(WINDOW_ATTENTIONS, 'cosine', GatedAttention)
    detector = small_detector(**cosine).double()
    image = torch.rand(1, 3, 96, 128, dtype=torch.double) * 255
    outs = build_graph(detector, 'backbone+neck+rpn')(image)
    preprocessor = detector.data_preprocessor
    maps = detector.extract_feat((image.flip(1) - preprocessor.mean) / preprocessor.std)
    assert relative_difference(outs[: len(maps)], maps) < 1e-9


def test_exports(cosine, small_detector, tmp_path):
    detector = small_detector(**cosine)
    export_onnx(detector, tmp_path / 'model.onnx', 'backbone+neck+rpn')
    operators = {node.op_type for node in onnx.load(tmp_path / 'model.onnx').graph.node}
    assert 'Softmax' in operators and 'LayerNormalization' not in operators
    sizes = [(64, 96), (131, 75)]
    checks = check_parity(detector, load_runtime(tmp_path / 'model.onnx', threads=1), random_images(sizes))
    assert [check.size for check in checks] == sizes
