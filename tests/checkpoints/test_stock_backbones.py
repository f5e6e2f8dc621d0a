"""mmdet's own backbones load pretrained weights into our norms completely, or say why not."""

import pytest
import torch
from conftest import randomize
from mmdet.registry import MODELS
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger

from slab_det.norms import PRepBN
from slab_det.runtime.errors import CheckpointError

SWIN = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
PVT = dict(type='PyramidVisionTransformer', embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 2, 2])


def saved_layernorm(backbone, folder):
    model = MODELS.build(backbone)
    randomize(model, 0)
    model.eval()
    path = folder / 'pretrained.pth'
    # mmdet's Swin reads whole detectors only.
    torch.save(dict(state_dict={f'backbone.{key}': value for key, value in model.state_dict().items()}), path)
    return model, ConfigDict(type='Pretrained', checkpoint=str(path))


@pytest.mark.parametrize('backbone', [SWIN, PVT], ids=lambda cfg: cfg['type'])
@torch.no_grad()
def test_layernorm_weights_fill_every_progressive_norm(backbone, tmp_path):
    source, init_cfg = saved_layernorm(backbone, tmp_path)
    eps = next(m.eps for m in source.modules() if isinstance(m, torch.nn.LayerNorm))
    model = MODELS.build(
        dict(**backbone, norm_cfg=dict(type='PRepBN', ln_eps=eps), convert_weights=False, init_cfg=init_cfg)
    )
    model.init_weights()
    model.eval()
    assert {norm.gamma for norm in model.modules() if isinstance(norm, PRepBN)} == {1.0}
    images = torch.randn(1, 3, 90, 70)
    for output, reference in zip(model(images), source(images), strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-4)
    assert model.init_cfg == init_cfg


@pytest.mark.parametrize('backbone', [SWIN, PVT], ids=lambda cfg: cfg['type'])
def test_weights_of_another_model_are_an_error(backbone, tmp_path):
    _, init_cfg = saved_layernorm(dict(backbone, embed_dims=16), tmp_path)
    model = MODELS.build(dict(**backbone, norm_cfg=dict(type='TokenBN'), convert_weights=False, init_cfg=init_cfg))
    with pytest.raises(CheckpointError, match='do not fit'):
        model.init_weights()


@pytest.mark.parametrize('backbone', [SWIN, PVT], ids=lambda cfg: cfg['type'])
def test_a_prefix_is_honoured_and_nothing_is_said_of_random_weights(backbone, tmp_path, monkeypatch):
    source, init_cfg = saved_layernorm(backbone, tmp_path)
    torch.save(
        {f'ema.backbone.{key}': value for key, value in source.state_dict().items()}
        | {f'backbone.{key}': torch.zeros_like(value) for key, value in source.state_dict().items()},
        init_cfg.checkpoint,
    )
    model = MODELS.build(
        dict(
            **backbone,
            norm_cfg=dict(type='TokenBN'),
            convert_weights=False,
            init_cfg=dict(init_cfg, prefix='ema.backbone.'),
        )
    )
    printed = []
    monkeypatch.setattr(
        MMLogger.get_current_instance(), 'callHandlers', lambda record: printed.append(record.getMessage())
    )
    model.init_weights()
    name = next(key for key in source.state_dict() if key.endswith('projection.weight'))
    assert torch.equal(model.state_dict()[name], source.state_dict()[name])
    assert 'scratch' not in ''.join(printed) and printed[-1].startswith('Loaded')
    model.init_cfg = None
    model.init_weights()
    assert 'from scratch' in printed[-1]


def test_options_of_init_cfg_that_nothing_would_read_are_refused(tmp_path):
    _, init_cfg = saved_layernorm(SWIN, tmp_path)
    model = MODELS.build(dict(**SWIN, norm_cfg=dict(type='TokenBN'), init_cfg=dict(init_cfg, map_location='cpu')))
    with pytest.raises(ValueError, match='SwinTransformer takes.*remove map_location'):
        model.init_weights()


def test_layernorm_backbones_load_as_mmdet_does(tmp_path):
    source, init_cfg = saved_layernorm(SWIN, tmp_path)
    model = MODELS.build(dict(**SWIN, init_cfg=init_cfg))
    model.init_weights()
    for key, value in source.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
