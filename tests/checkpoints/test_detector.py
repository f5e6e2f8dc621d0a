"""Whole detectors: what load_from, --resume, testing and mmdet's own API may load."""

from pathlib import Path

import pytest
import torch
from conftest import differing
from mmdet.apis import init_detector
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.runner import load_state_dict
from torch import nn

import slab_det
from slab_det.backbones import SLABSwin
from slab_det.checkpoints import check_detector_checkpoint
from slab_det.common.errors import CheckpointError
from slab_det.fusion import save_fused

SMALL = dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)


class Detector(nn.Module):
    def __init__(self, num_classes: int = 3, **config) -> None:
        super().__init__()
        self.backbone = SLABSwin(**{**SMALL, **config})
        self.neck = nn.Conv2d(16, 4, 1)
        self.bbox_head = nn.Linear(4, num_classes)


def checkpoint_of(model: nn.Module, prefix: str = '') -> dict:
    state = {
        prefix + key: torch.rand_like(value) if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    # As mmengine saves a checkpoint that can be resumed.
    return dict(meta=dict(epoch=0, iter=0), message_hub={}, state_dict=state)


def load(model: nn.Module, checkpoint: dict, complete: bool = False, **options) -> None:
    """Loads as a runner with CheckedLoadHook does, and removes ``module.`` from the names."""
    report = check_detector_checkpoint(model, checkpoint, **options)
    if complete:
        report.check_complete()
    load_state_dict(model, {key.removeprefix('module.'): value for key, value in checkpoint['state_dict'].items()})


@pytest.mark.parametrize('complete', [False, True])
@pytest.mark.parametrize('prefix', ['', 'module.'])
def test_own_checkpoints_load(complete, prefix):
    model = Detector(norm_cfg=dict(type='PRepBN'))
    checkpoint = checkpoint_of(model, prefix)
    saved = dict(checkpoint['state_dict'])
    load(model, checkpoint, complete=complete)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, saved[prefix + key].to(value.dtype), msg=key)


def test_official_backbone_is_converted_in_place():
    official = torch.load(Path(__file__).parents[1] / 'data/prepbn_swin_official.pt', weights_only=True)
    config, state = official['config'], official['state_dict']['model']
    sizes = dict(embed_dims=config['embed_dim'], depths=config['depths'], num_heads=config['num_heads'])
    stages = dict(strides=(4, 2, 2, 2), out_indices=(0, 1, 2, 3), window_size=7)
    model = Detector(**sizes, **stages, norm_cfg=dict(type='PRepBN'), out_norm_cfg=dict(type='LN'))
    head = checkpoint_of(model)['state_dict']['bbox_head.weight']
    heads = {key: value for key, value in model.state_dict().items() if not key.startswith('backbone.')}
    checkpoint = dict(state_dict={f'backbone.{key}': value for key, value in state.items()} | heads)
    checkpoint['state_dict']['bbox_head.weight'] = head
    with pytest.raises(CheckpointError, match='slab_official .*CheckedLoadHook'):
        model.load_state_dict(checkpoint['state_dict'])
    load(model, checkpoint, complete=True)
    norm = model.backbone.stages[0].blocks[0].norm1
    assert norm.gamma == 0.0 and norm.statistics_loaded
    assert torch.equal(model.bbox_head.weight, head)


def test_nothing_matched_is_an_error():
    for state in ({'encoder.weight': torch.zeros(2)}, checkpoint_of(SLABSwin(**SMALL))['state_dict']):
        with pytest.raises(CheckpointError, match='nothing matches.*init_cfg'):
            load(Detector(), dict(state_dict=state))


@pytest.mark.parametrize('complete', [False, True])
def test_a_detector_of_nan_or_behind_a_prefix_is_refused(complete):
    checkpoint = checkpoint_of(Detector())
    checkpoint['state_dict']['neck.weight'][0] = float('nan')
    with pytest.raises(CheckpointError, match=r'1 weights are NaN or infinite \(neck\.weight\)'):
        load(Detector(), checkpoint, complete=complete)
    # What is not loaded may be anything.
    load(Detector(), checkpoint, reinitialize=['neck'])
    with pytest.raises(CheckpointError, match=r"key\.removeprefix\('model\.'\)"):
        load(Detector(), checkpoint_of(Detector(), 'model.'), complete=complete)


def test_shapes_that_do_not_fit_are_errors_unless_reinitialized():
    checkpoint = checkpoint_of(Detector(num_classes=80))
    model = Detector(num_classes=3)
    with pytest.raises(CheckpointError, match=r'bbox_head\.weight \(80, 4\).*reinitialize'):
        load(model, dict(checkpoint))
    before = model.bbox_head.weight.detach().clone()
    load(model, checkpoint, reinitialize=['bbox_head'])
    assert torch.equal(model.bbox_head.weight, before)
    assert torch.equal(model.neck.weight, checkpoint['state_dict']['neck.weight'])


@pytest.mark.parametrize('lost', ['neck.weight', 'backbone.norm1.weight', 'backbone.stages.0.blocks.1.norm1.bias'])
def test_missing_weights_are_errors_where_all_are_needed_and_surplus_ones_are_reported(lost):
    model = Detector()
    checkpoint = checkpoint_of(model)
    del checkpoint['state_dict'][lost]
    checkpoint['state_dict']['mask_head.weight'] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=lost.replace('.', r'\.')):
        load(model, dict(checkpoint), complete=True)
    report = check_detector_checkpoint(model, checkpoint)
    assert report.missing_unexpected == [lost] and report.unused_unexpected == ['mask_head.weight']
    assert 'mask_head.weight' in str(report)


@pytest.mark.parametrize('norm', ['LN', 'PRepBN', 'UN'])
def test_a_checkpoint_of_the_same_model_stays_as_it_is(norm):
    # EMAHook swaps its weights with this state dict by name.
    model = Detector(norm_cfg=dict(type=norm))
    checkpoint = checkpoint_of(model)
    state = checkpoint['state_dict']
    check_detector_checkpoint(model, checkpoint)
    assert checkpoint['state_dict'] is state


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    return tmp_path_factory.mktemp('files')


@pytest.fixture
def unfused_and_fused(files, small_detector, small_detector_cfg):
    """(config, checkpoint) of a small Faster R-CNN, unfused and fused."""
    backbone = dict(norm_cfg=dict(type='RepBN'))
    cfg, path = Config(dict(model=small_detector_cfg('faster_rcnn', **backbone))), files / 'fused.pth'
    if not path.exists():
        model, meta = small_detector('faster_rcnn', **backbone), dict(classes='abc')
        torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=meta)), files / 'unfused.pth')
        save_fused(slab_det.fuse(model), cfg, path, meta)
    return (cfg, files / 'unfused.pth'), (Config.fromfile(files / 'fused_config.py'), path)


def build(cfg, path, options=None):
    return init_detector(cfg, str(path), palette='coco', device='cpu', cfg_options=options)


def lose(prefix):
    return lambda state: {key: value for key, value in state.items() if not key.startswith(prefix)}


def resize(key):
    return lambda state: {**state, key: torch.zeros(11, *state[key].shape[1:])}


@pytest.mark.parametrize(
    ('config', 'weights', 'change', 'words'),
    [
        ('fused', 'unfused', lambda state: state, 'is not fused as the model is'),
        ('unfused', 'fused', lambda state: state, 'is fused: it has no norms'),
        ('fused', 'fused', lose('neck.fpn_convs.'), 'missing: neck.fpn_convs.0.conv.weight'),
        ('fused', 'fused', lose('backbone.stages.3.'), 'missing: backbone.stages.3'),
        ('fused', 'fused', resize('backbone.stages.0.blocks.0.attn.w_msa.qkv.bias'), r'qkv.bias \(11,\)'),
    ],
)
@pytest.mark.parametrize('way', ['init_detector', 'load_state_dict'])
def test_misfits_and_missing_weights_are_refused(unfused_and_fused, tmp_path, config, weights, change, words, way):
    pairs = dict(zip(('unfused', 'fused'), unfused_and_fused, strict=True))
    checkpoint = torch.load(pairs[weights][1], weights_only=True)
    # Without meta: only the keys tell whether the file is fused.
    checkpoint = dict(state_dict=change(checkpoint['state_dict']), meta=dict(dataset_meta=dict(classes='abc')))
    path, cfg = tmp_path / 'weights.pth', pairs[config][0]
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=words):
        if way == 'init_detector':
            build(cfg, path)
        else:
            MODELS.build(cfg.model).load_state_dict(checkpoint['state_dict'])


@pytest.mark.parametrize('scope', ['mmdet', 'mmengine', None])
@pytest.mark.parametrize('options', [None, {'model.test_cfg.rcnn.score_thr': 0.3}], ids=['plain', 'options'])
def test_whole_detectors_load(unfused_and_fused, options, scope):
    for cfg, path in unfused_and_fused:
        # The config of a detector in a foreign scope says where its parts are.
        cfg.default_scope, detector = scope, cfg.model.get('model', cfg.model)
        detector['_scope_'] = 'mmdet'
        model = build(cfg, path, options)
        assert model.test_cfg.rcnn.score_thr == (0.3 if options else 0.05)
        assert not differing(model, torch.load(path, weights_only=True)['state_dict'])
