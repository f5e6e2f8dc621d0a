"""mmdet's own backbones with our norms: load_pretrained fills them; a load by key that would fill half is an error."""

import pytest
import torch
from conftest import randomize
from mmdet.registry import MODELS
from mmengine.config import ConfigDict

from slab_det.checkpoints import load_pretrained
from slab_det.norms import PRepBN

BACKBONES = [
    dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)),
    dict(type='PyramidVisionTransformer', embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 2, 2]),
]


@pytest.mark.parametrize('backbone', BACKBONES, ids=lambda cfg: cfg['type'])
@torch.no_grad()
def test_layernorm_weights_fill_every_progressive_norm_or_none(backbone, tmp_path):
    source = MODELS.build(backbone)
    randomize(source, 0)
    source.eval()
    path = tmp_path / 'pretrained.pth'
    # mmdet's Swin reads whole detectors only, its PVT backbones only.
    prefix = 'backbone.' if backbone['type'] == 'SwinTransformer' else ''
    torch.save(dict(state_dict={f'{prefix}{key}': value for key, value in source.state_dict().items()}), path)
    eps = next(module.eps for module in source.modules() if isinstance(module, torch.nn.LayerNorm))
    model = MODELS.build(
        dict(
            **backbone,
            norm_cfg=dict(type='PRepBN', ln_eps=eps),
            convert_weights=False,
            init_cfg=ConfigDict(type='Pretrained', checkpoint=str(path)),
        )
    )
    with pytest.raises(
        RuntimeError, match=r'norm: the weights \(weight, bias\) are those of another norm.*load_pretrained'
    ):
        model.init_weights()
    load_pretrained(model, path)
    model.eval()
    assert {norm.gamma for norm in model.modules() if isinstance(norm, PRepBN)} == {1.0}
    images = torch.randn(1, 3, 90, 70)
    for output, reference in zip(model(images), source(images), strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-4)
