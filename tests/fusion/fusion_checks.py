"""Checks for tests of fusion: equal outputs of fused and unfused models, and the norms that became affine."""

import torch
from conftest import raw_outputs, relative_difference

from slab_det.norms import ChannelAffine, OfflineNorm

# Maps of 19 x 26, 10 x 13, 5 x 7 and 3 x 4 tokens: padded to windows of 7 in height and width, odd in both.
SIZE = (75, 102)


@torch.no_grad()
def outputs(model, images):
    """The feature maps of a backbone, or the raw outputs of a detector before its last NMS."""
    if hasattr(model, 'roi_head'):
        # A cascade gives a list of the proposals, then lists with the outputs of each stage.
        return [x for part in raw_outputs(model, images) for x in (part if isinstance(part, list | tuple) else [part])]
    if hasattr(model, 'bbox_head'):
        features = model.extract_feat(images)
        return [*features, *(x for level in model.bbox_head(features) for x in level)]
    return list(model(images))


def assert_fused_equals(fused, model, sizes=(SIZE,)):
    """Asserts equal outputs in float64, on batches of one and two images."""
    for i, size in enumerate(sizes):
        images = torch.randn(1 + i % 2, 3, *size).double()
        difference = relative_difference(outputs(fused, images), outputs(model, images))
        assert difference <= 1e-9, (size, difference)


def left_affine(fused):
    """The norms that are now one multiply-add, with the reason; no offline norm may be left."""
    assert not [module for module in fused.modules() if isinstance(module, OfflineNorm)]
    left = {fusion.norm: fusion.reason for fusion in fused.fusion_report.select('affine')}
    names = [name for name, m in fused.named_modules(remove_duplicate=False) if isinstance(m, ChannelAffine)]
    assert sorted(left) == sorted(names)
    return left
