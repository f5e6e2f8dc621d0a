"""absorb with ffn: redundant hidden channels are removed from the FFNs of every library."""

import pytest
import torch
from conftest import differing, layer_norms, pictures, raw_outputs, relative_difference
from mmengine.config import Config
from teachers import build_teacher
from torch import nn

import slab_det
from slab_det.absorption.absorb import absorb
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
def test_redundant_channels_are_pruned(teacher, backbone):
    model, images = teacher(backbone).double(), [image.double() for image in pictures(10)]
    half, few = (absorb(model, images, keep='all', ffn=share, progress=False) for share in (0.5, 0.75))
    assert layer_norms(half) == layer_norms(few) == layer_norms(model)
    for ffn in half.absorption_report.pruned:
        rows, all_rows = (first_weight(net, ffn.place) for net in (half, model))
        assert len(all_rows) == ffn.channels and len(rows) == ffn.kept == max(8, ffn.channels // 2)
        assert {*map(tuple, rows.tolist())} < {*map(tuple, all_rows.tolist())}
    for size in ((66, 70), (75, 101)):
        image = pictures(1, size, seed=5)[0].double()
        with torch.no_grad():
            maps = model.extract_feat(image)
            losses = [relative_difference(student.extract_feat(image), maps) for student in (half, few)]
            assert losses[0] < 1e-2 and losses[0] < losses[1], losses
            assert relative_difference(slab_det.deploy(few).extract_feat(image), few.extract_feat(image)) < 1e-9
    assert f'channels removed in {len(half.absorption_report.pruned)} places' in str(half.absorption_report)


@pytest.mark.parametrize('backbone', ['SLABSwin', 'BN+FFNBN', 'FFN norm', 'PyramidVisionTransformer'])
def test_a_pruned_detector_without_norms_is_saved_rebuilt_and_deployed(teacher, backbone, tmp_path):
    model = teacher(backbone)
    student = absorb(slab_det.fuse(model), pictures(5), keep=0, ffn=0.75, progress=False)
    assert not layer_norms(student) and student.absorption_report.pruned
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


@pytest.mark.parametrize(
    ('backbone', 'keep', 'reason'),
    [
        ('FFN norm', 'all', 'a norm stands between its layers'),
    ],
)
def test_an_ffn_with_more_than_two_layers_is_left_alone(teacher, backbone, keep, reason):
    student = absorb(teacher(backbone), pictures(5), keep=keep, ffn=0.5, progress=False)
    report = student.absorption_report
    assert [(ffn.place, ffn.reason) for ffn in report.channels] == [(name, reason) for name in ffns_of(student)]
    assert f'{report.channels[0].place}: left alone, {reason}' in str(report)


def test_pruning_resumes_from_its_work_dir(teacher, tmp_path):
    model = teacher('SLABSwin')
    options = dict(keep=0, ffn=0.5, work_dir=tmp_path, progress=False)
    student = absorb(model, pictures(5), **options)
    again = absorb(model, pictures(5), **options)
    assert not differing(student, again) and again.absorption_report.pruned == student.absorption_report.pruned
    other = absorb(model, pictures(5), **options | dict(ffn=0.25))
    assert other.absorption_report.pruned != student.absorption_report.pruned


def test_a_detector_without_norms_to_absorb_needs_a_share(teacher):
    model = slab_det.fuse(teacher('BN+FFNBN'))
    with pytest.raises(ConversionError, match='no LayerNorm that can be absorbed'):
        absorb(model, pictures(5), keep='auto', progress=False)
    for options, message in (
        (dict(ffn=1.0), 'ffn=1.0: give a share from 0 to below 1'),
        (dict(keep='all'), "keep='all' leaves nothing to absorb"),
    ):
        with pytest.raises(ConversionError, match=message):
            absorb(model, pictures(5), **options, progress=False)
    half = absorb(model, pictures(5), ffn=0.5, progress=False)
    quarter = absorb(half, pictures(5), ffn=0.5, progress=False)
    assert [ffn.channels for ffn in quarter.absorption_report.pruned] == [
        ffn.kept for ffn in half.absorption_report.pruned if ffn.kept > 8
    ]
