"""absorb removes redundant hidden channels from the FFNs of every library, also of detectors without norms."""

import pytest
import torch
from conftest import differing, layer_norms, pictures, raw_outputs, relative_difference
from mmengine.config import Config
from teachers import build_teacher, prune, survey
from torch import nn

import slab_det
from slab_det.absorption.absorption import absorb
from slab_det.backbones.adopt import adopt
from slab_det.checkpoints import build_detector
from slab_det.conversion import ConversionError
from slab_det.fusion import save_fused
from slab_det.fusion.channels import find_channels

TWINS = 'SLABSwin', 'SwinTransformer', 'SLABPVT', 'PyramidVisionTransformer'
CONV_TWINS = 'PVTv2', 'PyramidVisionTransformerV2'


def ffns_of(model):
    """The FFNs of a backbone, by their names."""
    return {name: module for name, module in model.named_modules() if name.endswith(('.ffn', '.mlp'))}


def first_weight(model, name):
    """Weight of the first layer of an FFN, (hidden, C)."""
    return model.get_submodule(find_channels(model)[name].writers[0]).weight.flatten(1)


@pytest.fixture
def teacher():
    """A function: a Faster R-CNN in which every second hidden channel of an FFN is twice the channel before it."""

    def build(backbone):
        model = build_teacher(backbone, 'faster_rcnn', act_cfg=dict(type='ReLU'))
        for name in ffns_of(model) if backbone in (*TWINS, *CONV_TWINS) else ():
            fc1, *_ = map(model.get_submodule, find_channels(model)[name].writers)
            fc1.weight.data[1::2] = 2 * fc1.weight.data[::2]
            fc1.bias.data[1::2] = 2 * fc1.bias.data[::2]
            for layer in model.get_submodule(name).modules():
                if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                    layer.weight.data[1::2] = layer.weight.data[::2]
                    layer.bias.data[1::2] = 2 * layer.bias.data[::2]
        return model

    return build


@pytest.mark.parametrize('backbone', [*TWINS, *CONV_TWINS])
def test_redundant_channels_are_pruned(teacher, backbone, tmp_path):
    model = teacher(backbone).double()
    adopt(model)
    surveyed = survey(model, [image.double() for image in pictures(10)], tmp_path)
    counts = {name: len(first_weight(model, name)) for name in ffns_of(model) if name in surveyed.estimates}
    assert len(counts) > 2
    half, few = (prune(surveyed, {name: max(8, count // part) for name, count in counts.items()}) for part in (2, 4))
    assert layer_norms(half) == layer_norms(few) == layer_norms(model)
    for ffn in half.absorption_report.pruned:
        rows, all_rows = (first_weight(net, ffn.unit) for net in (half, model))
        assert len(all_rows) == ffn.channels and len(rows) == ffn.kept == max(8, ffn.channels // 2)
        assert {*map(tuple, rows.tolist())} < {*map(tuple, all_rows.tolist())}
    for size in ((66, 70), (75, 101)):
        image = pictures(1, size, seed=5)[0].double()
        with torch.no_grad():
            maps = model.extract_feat(image)
            losses = [relative_difference(student.extract_feat(image), maps) for student in (half, few)]
            assert losses[0] < 1e-2 and losses[0] < losses[1], losses
            assert relative_difference(slab_det.deploy(few).extract_feat(image), few.extract_feat(image)) < 1e-9
    assert f'channels removed in {len(half.absorption_report.pruned)} units' in str(half.absorption_report)


@pytest.mark.parametrize('backbone', ['SLABSwin', 'BN+FFNBN', 'FFN norm', 'PyramidVisionTransformer'])
def test_a_pruned_detector_without_norms_is_saved_rebuilt_and_deployed(teacher, backbone, tmp_path):
    model = teacher(backbone)
    student = absorb(slab_det.fuse(model), pictures(5), 0.6, 'remove', progress=False)
    pruned = {unit.unit for unit in student.absorption_report.pruned}
    # An FFN with a norm that goes keeps its channels.
    assert not layer_norms(student) and bool(pruned & ffns_of(student).keys()) == (backbone != 'FFN norm')
    checkpoint, config = save_fused(student, Config(dict(model=model.cfg)), tmp_path / 'fused.pth')
    if backbone == 'BN+FFNBN':
        # The student is saved with the config of a detector that was fused earlier.
        _, before = save_fused(slab_det.fuse(model), Config(dict(model=model.cfg)), tmp_path / 'before.pth')
        checkpoint, config = save_fused(student, Config.fromfile(before), tmp_path / 'again.pth')
    rebuilt = build_detector(Config.fromfile(config), str(checkpoint))
    assert not differing(student, rebuilt)
    image = pictures(1, (75, 101), seed=5)[0]
    with torch.no_grad():
        expected = raw_outputs(student, image)
        assert all(map(torch.equal, raw_outputs(rebuilt, image), expected))
        deployed = slab_det.deploy(rebuilt)
        assert relative_difference(deployed.extract_feat(image), student.extract_feat(image)) < 1e-4


def test_an_ffn_with_more_than_two_layers_is_left_alone(teacher):
    student = absorb(teacher('FFN norm'), pictures(5), 0.7, progress=False)
    report, reason = student.absorption_report, 'a norm stands between its layers'
    alone = [unit.unit for unit in report.channels if unit.reason == reason]
    assert alone == [*ffns_of(student)]
    assert f'{alone[0]}: left alone, {reason}' in str(report)


def test_a_detector_without_norms_to_absorb_needs_a_share(teacher):
    model = slab_det.fuse(teacher('BN+FFNBN'))
    with pytest.raises(ConversionError, match='no LayerNorm that can be absorbed: .* or channels=0.5'):
        absorb(model, pictures(5), 1, 'remove', progress=False)
    assert absorb(model, pictures(5), 0.6, progress=False).absorption_report.pruned
