"""SLABViT: initialisation as in DeiT, and exact fusion and deployment in a detector and in a classifier."""

import pytest
import torch
from conftest import as_trained, random_sizes, raw_outputs, relative_difference
from mmdet.registry import MODELS
from test_backbones import VIT, build

import slab_det
from slab_det.checkpoints import load_pretrained

CLASSIFIER = dict(VIT, out_type='cls_token')


@pytest.fixture
def detector(small_detector_cfg):
    """Returns a function that makes a Mask R-CNN on SLABViT: random weights, eval mode, gamma 0, three levels."""

    def make(**options):
        cfg = small_detector_cfg()
        cfg.backbone = dict(VIT, **options)
        cfg.neck.update(in_channels=[16], num_outs=3)
        cfg.rpn_head.anchor_generator.strides = [16, 32, 64]
        for extractor in (cfg.roi_head.bbox_roi_extractor, cfg.roi_head.mask_roi_extractor):
            extractor.featmap_strides = [16, 32]
        cfg.test_cfg.rpn.update(nms_pre=40, max_per_img=20)
        return as_trained(MODELS.build(cfg)).double()

    return make


def test_starts_from_scratch_as_deit():
    model = build(CLASSIFIER, embed_dims=64)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.startswith('blocks') and parameter.ndim == 2 or name in ('cls_token', 'positions.pos_embed'):
            assert 0.015 < parameter.std() < 0.025, name
        elif 'norm' not in name and 'embed.projection' not in name:
            assert not parameter.any(), name


@pytest.mark.parametrize('options', [dict(), dict(attention='sla', norm_cfg=dict(type='UN'))], ids=str)
@torch.no_grad()
def test_a_detector_is_fused_and_deployed_exactly(detector, options):
    model = detector(**options)
    fused = slab_det.fuse(model)
    assert [norm.outcome for norm in fused.fusion_report.norms] == ['folded'] * 5
    deployed = slab_det.deploy(fused)
    for size in random_sizes(3, seed=0):
        image = torch.randn(2, 3, *size, dtype=torch.float64)
        expected = raw_outputs(model, image)
        assert relative_difference(raw_outputs(fused, image), expected) < 1e-9
        assert relative_difference(raw_outputs(deployed, image), expected) < 1e-9


@torch.no_grad()
def test_a_classifier_is_fused_and_deployed_except_its_last_norm():
    model = as_trained(build(CLASSIFIER)).double()
    fused = slab_det.fuse(model)
    assert [norm.norm for norm in fused.fusion_report.select('affine')] == ['norm']
    deployed, image = slab_det.deploy(fused), torch.randn(2, 3, 70, 64, dtype=torch.float64)
    for other in (fused, deployed):
        assert relative_difference(other(image), model(image)) < 1e-9
    # A detector has no class token.
    assert load_pretrained(build(VIT), model.state_dict()).complete
