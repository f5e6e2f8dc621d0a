"""Detectors of ours load whole or not at all through mmdet's own API, without a hook or a patch of ours."""

import pytest
import torch
from mmdet.apis import init_detector
from mmdet.registry import MODELS
from mmengine.config import Config

import slab_det
from slab_det.fusion import save_fused
from slab_det.runtime.errors import CheckpointError


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    return tmp_path_factory.mktemp('files')


@pytest.fixture
def unfused_and_fused(files, small_detector, small_detector_cfg):
    """(config, checkpoint) of a small Faster R-CNN, unfused and fused."""
    backbone = dict(norm_cfg=dict(type='RepBN'))
    cfg, path = Config(dict(model=small_detector_cfg('faster_rcnn', **backbone))), files / 'fused.pth'
    model = small_detector('faster_rcnn', **backbone)
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes='abc'))), files / 'unfused.pth')
    save_fused(slab_det.fuse(model), cfg, path, dict(classes='abc'))
    return (cfg, files / 'unfused.pth'), (Config.fromfile(files / 'fused_config.py'), path)


def build(cfg, path):
    # Without options init_detector reads cfg.model.backbone, which a FusedDetector has inside.
    return init_detector(cfg, str(path), palette='coco', device='cpu', cfg_options={})


def lose(prefix):
    return lambda state: {key: value for key, value in state.items() if not key.startswith(prefix)}


def resize(key):
    return lambda state: {**state, key: torch.zeros(11, *state[key].shape[1:])}


@pytest.mark.parametrize(
    ('config', 'weights', 'change', 'words'),
    [
        ('fused', 'unfused', lambda state: state, 'is not fused as the model is'),
        ('unfused', 'fused', lambda state: state, 'is fused: it has no norms, the model still has them'),
        ('fused', 'fused', lose('neck.'), 'is not fused as the model is.*neck.lateral_convs.0.conv'),
        ('fused', 'fused', lose('neck.fpn_convs.'), 'weights of the model are missing: neck.fpn_convs.0.conv.weight'),
        ('fused', 'fused', lose('roi_head.'), 'weights of the model are missing: roi_head.bbox_head'),
        ('fused', 'fused', lose('backbone.stages.3.'), r'is not fused as the model is \(it has no backbone.stages.3'),
        ('fused', 'fused', resize('neck.fpn_convs.0.conv.bias'), r'neck.fpn_convs.0.conv.bias \(11,\)'),
        ('fused', 'fused', resize('backbone.stages.0.blocks.0.attn.w_msa.qkv.bias'), r'qkv.bias \(11,\)'),
    ],
)
@pytest.mark.parametrize('way', ['init_detector', 'load_state_dict'])
def test_what_does_not_fill_a_detector_is_refused(unfused_and_fused, tmp_path, config, weights, change, words, way):
    pairs = dict(zip(('unfused', 'fused'), unfused_and_fused, strict=True))
    checkpoint = torch.load(pairs[weights][1], weights_only=True)
    # Without the word of the file: the keys alone tell.
    checkpoint = dict(state_dict=change(checkpoint['state_dict']), meta=dict(dataset_meta=dict(classes='abc')))
    path, cfg = tmp_path / 'weights.pth', pairs[config][0]
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=words):
        if way == 'init_detector':
            build(cfg, path)
        else:
            MODELS.build(cfg.model).load_state_dict(checkpoint['state_dict'])


def test_whole_detectors_load(unfused_and_fused):
    for cfg, path in unfused_and_fused:
        model = build(cfg, path)
        for key, value in torch.load(path, weights_only=True)['state_dict'].items():
            assert torch.equal(model.state_dict()[key], value), key
