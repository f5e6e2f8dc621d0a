"""Fold rules of modules outside the package, and the folds that a fused config stores."""

import copy

import pytest
import torch
from conftest import relative_difference
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

import slab_det
from slab_det.fusion import Fold, FusionError, register_folds, save_fused
from slab_det.norms import ChannelAffine, RepBN


class ForeignBlock(nn.Module):
    """A block of another library: ``fc`` alone reads ``norm``."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = RepBN(6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.fc(self.norm(x))


class OwnBlock(ForeignBlock):
    def forward(self, x):
        return self.fc(self.norm(x)) * 2

    def folds(self):
        yield Fold('norm', 'fc')


class OtherForward(OwnBlock):
    def forward(self, x):
        return super().forward(x) + self.norm(x).sum()


@pytest.mark.parametrize(
    ('kind', 'outcome'), [(OwnBlock, 'folded'), (OtherForward, 'affine'), (ForeignBlock, 'folded')]
)
@torch.no_grad()
def test_a_module_outside_the_package_names_the_reader_of_its_norm(kind, outcome):
    if kind is ForeignBlock:
        register_folds(ForeignBlock, folds=lambda block: [Fold('norm', before='fc')])
    block = kind().double().eval()
    block.norm.set_statistics(torch.randn(6).double(), torch.rand(6).double() + 0.1)
    fused = slab_det.fuse(block)
    assert [norm.outcome for norm in fused.fusion_report.norms] == [outcome], str(fused.fusion_report)
    x = torch.randn(2, 5, 6).double()
    assert relative_difference([fused(x)], [block(x)]) <= 1e-9


def test_a_saved_config_stores_the_folds_and_needs_no_rules(tmp_path, small_detector, small_detector_cfg):
    fused = slab_det.fuse(small_detector())
    cfg = small_detector_cfg()
    checkpoint, config = save_fused(fused, Config(dict(model=cfg)), tmp_path / 'fused.pth')
    meta = torch.load(checkpoint, weights_only=True)['meta']
    model = Config.fromfile(config).model
    assert meta['slab_det_version'] == slab_det.__version__ and meta['folds'] == model.to_dict()['folds']
    assert len(model.folds) == len(fused.fusion_report.norms)

    # The stored folds decide, not the current rules: here the config says affine for a norm that would fold.
    changed = copy.deepcopy(model)
    norm = next(fold for fold in changed.folds if fold.norm == 'backbone.norm0')
    norm.pop('into')
    norm.update(outcome='affine', reason='')
    rebuilt = MODELS.build(changed)
    assert isinstance(rebuilt.backbone.norm0, ChannelAffine) and isinstance(rebuilt.backbone.norm1, nn.Identity)
    assert str(MODELS.build(model).fusion_report) == str(fused.fusion_report)


def test_folds_of_another_model_are_refused(small_detector, small_detector_cfg):
    folds = [fusion.to_dict() for fusion in slab_det.fuse(small_detector()).fusion_report.norms]
    with pytest.raises(FusionError, match='folds belong to another model'):
        MODELS.build(dict(type='FusedDetector', model=small_detector_cfg(), folds=folds[:-1]))
    with pytest.raises(FusionError, match='folds belong to another model'):
        MODELS.build(dict(type='FusedDetector', model=small_detector_cfg(), folds=[dict(folds[0], norm='no.norm')]))
