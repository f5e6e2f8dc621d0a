"""Output norms fold if the detector passes the outputs of its backbone to the FPN alone."""

import pytest
import torch
from conftest import SMALL_SWIN, as_trained, random_sizes, raw_outputs, small_mmdet_cfg
from fusion_checks import assert_fused_equals, left_affine
from mmdet.models.detectors import RetinaNet
from mmdet.registry import MODELS
from mmengine.config import Config

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.fusion import save_fused


@pytest.fixture
def build():
    def build(name, backbone=SMALL_SWIN, **neck):
        return as_trained(MODELS.build(small_mmdet_cfg(f'_base_/models/{name}', backbone, **neck)), 5).double()

    return build


# Odd in both directions.
SIZES = [(height | 1, width | 1) for height, width in random_sizes(3, seed=6)]


def test_a_python_style_config_is_written_so_that_it_loads(small_detector_cfg, tmp_path):
    text = repr(small_detector_cfg().to_dict())
    for name in ('RoIAlign', 'nms'):
        assert f"'type': '{name}'" in text
        text = text.replace(f"'type': '{name}'", f"'type': {name}")
    (tmp_path / 'lazy.py').write_text(f'from mmcv.ops import RoIAlign, nms\n\ndefault_scope = None\nmodel = {text}\n')
    cfg = Config.fromfile(tmp_path / 'lazy.py', lazy_import=True)
    fused = slab_det.fuse(as_trained(build_detector(cfg)))
    checkpoint, config = save_fused(fused, cfg, tmp_path / 'fused.pth')
    loaded, images = build_detector(Config.fromfile(config), str(checkpoint)), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert all(map(torch.equal, raw_outputs(loaded, images), raw_outputs(fused, images)))


class OwnDetector(RetinaNet):
    """Overrides extract_feat, which may pass the outputs of the backbone to other modules."""

    def extract_feat(self, images):
        return super().extract_feat(images)


def test_output_norms_of_a_detector_with_an_extract_feat_of_its_own_become_affine(build):
    model = build('retinanet_r50_fpn', start_level=0, add_extra_convs='on_output')
    assert left_affine(slab_det.fuse(model)) == {}
    model.extract_feat = model.extract_feat
    assert len(left_affine(slab_det.fuse(model))) == 4, 'an extract_feat set on the object may read the outputs'
    del model.extract_feat
    model.__class__ = OwnDetector
    fused = slab_det.fuse(model)
    left = left_affine(fused)
    assert left.keys() == {f'backbone.norm{i}' for i in range(4)}
    assert all('OwnDetector' in reason for reason in left.values())
    assert_fused_equals(fused, model, SIZES)
