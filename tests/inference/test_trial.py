"""What deploy's comparison with the original accepts, and what it refuses."""

import copy

import pytest
import torch
from conftest import SMALL_PVT, as_trained
from mmdet.registry import MODELS
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import slab_det
from slab_det.backbones.blocks import ConvFFN
from slab_det.common.errors import DeploymentError

HALF = (torch.bfloat16, torch.float16)
LN = dict(norm_cfg=dict(type='LN'))


class Changed(nn.Module):
    """Changes the output of an FFN."""

    def __init__(self, ffn, change):
        super().__init__()
        self.ffn, self.change = ffn, change

    def forward(self, x, hw_shape, identity):
        return self.change(self.ffn(x, hw_shape, identity), identity)


def change_ffns(monkeypatch, change):
    """Makes deploy change the outputs of FFNs: ``change`` of the output and the identity."""
    monkeypatch.setattr(
        'slab_det.inference.deployment.deployed_merging',
        lambda layer: Changed(layer, change) if type(layer) is ConvFFN else None,
    )


def own_backbone(change=None, returned=tuple, **cfg):
    """A user's subclass of SLABPVT that changes its first map, and returns its maps in some form."""

    class OwnPVT(MODELS.get('SLABPVT')):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.change = change or nn.Identity()

        def forward(self, x):
            first, *others = super().forward(x)
            return returned([self.change(first), *others])

    arguments = {**SMALL_PVT, **LN, **cfg}
    arguments.pop('type')
    return as_trained(OwnPVT(**arguments))


class Each(nn.Module):
    """Applies a function to a layer and a map."""

    def __init__(self, layer, function=lambda layer, x: layer(x)):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer, x)


class Gated(nn.Conv2d):
    """A convolution with a layer of its own."""

    def __init__(self, channels):
        super().__init__(channels, channels, 1)
        self.gate = nn.Conv2d(channels, 1, 1)

    def forward(self, x):
        return super().forward(x) * self.gate(x).sigmoid()


class Pair(nn.Conv2d):
    """A convolution that takes and returns more than one tensor."""

    def forward(self, x, skip):
        return super().forward(x) + skip, skip


def tiny(conv, x):
    return x + conv(x * 1e-7)


LAYERS = {
    'keyword': lambda: Each(nn.Conv2d(8, 8, 1), lambda conv, x: conv(input=x)),
    'size of the output': lambda: Each(
        nn.ConvTranspose2d(8, 8, 3, 2, 1), lambda conv, x: conv(x, output_size=(2 * x.shape[2], 2 * x.shape[3]))
    ),
    'parametrized': lambda: Each(weight_norm(nn.Conv2d(8, 8, 1))),
    'layer in a layer': lambda: Each(Gated(8)),
    'two tensors': lambda: Each(Pair(8, 8, 1), lambda conv, x: conv(x, x)[0]),
    'below the normal numbers of float16': lambda: Each(nn.Conv2d(8, 8, 1, bias=False), tiny),
    'float32 output': lambda: Each(nn.Identity(), lambda _, x: x.float() if x.dtype.itemsize == 2 else x),
}


@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('name', LAYERS)
def test_layers_of_a_user_are_accepted(name, dtype):
    check = slab_det.deploy(own_backbone(LAYERS[name]()), dtype).deployment_check
    assert check.difference < 2 * check.rounding, check


@pytest.mark.parametrize('seed', range(6, 9))
def test_rounding_that_changes_a_few_tokens_by_much_is_accepted(seed):
    # ReLU leaves some queries with one channel above zero, by rounding: linear attention divides it by itself.
    model = as_trained(MODELS.build(dict(SMALL_PVT, **LN, attention='sla')), seed)
    slab_det.deploy(model, torch.bfloat16)


@pytest.mark.parametrize('dtype', [None, torch.bfloat16], ids=str)
def test_a_difference_is_refused_if_every_image_has_it(monkeypatch, dtype):
    model, calls = own_backbone(), []

    def wrong(until):
        def change(output, identity):
            calls.append(1)
            return output * (1.1 if len(calls) <= until else 1.0)

        return change

    blocks = sum(SMALL_PVT['num_layers'])
    for images, is_refused in ((1, False), (3, False), (4, True)):
        calls.clear()
        change_ffns(monkeypatch, wrong(images * blocks))
        if is_refused:
            with pytest.raises(DeploymentError, match='computes something else'):
                slab_det.deploy(model, dtype)
        else:
            slab_det.deploy(model, dtype)


NEEDS_FLOAT32 = dict(
    cast=lambda layer, x: x + layer(x.permute(0, 2, 3, 1).float()).permute(0, 3, 1, 2),
    constant=lambda layer, x: x + layer(torch.ones(8))[:, None, None],
)


@pytest.mark.parametrize('name', NEEDS_FLOAT32)
def test_a_model_that_does_not_run_in_float64_is_checked_in_float32(monkeypatch, name):
    model = own_backbone(Each(nn.Linear(8, 8), NEEDS_FLOAT32[name]))
    check = slab_det.deploy(model).deployment_check
    assert check.num_values > 1000 and check.difference < 1e-6
    change_ffns(monkeypatch, lambda output, _: output * 1.0001)
    with pytest.raises(DeploymentError, match='computes something else'):
        slab_det.deploy(model)


@pytest.mark.parametrize(
    'returned',
    [lambda maps: dict(enumerate(maps)), lambda maps: (maps[0], [maps[1], None]), lambda maps: maps[0]],
    ids=['dict', 'nested', 'tensor'],
)
def test_maps_are_compared_in_every_form(monkeypatch, returned):
    model = own_backbone(returned=returned)
    assert slab_det.deploy(model).deployment_check.num_values > 1000
    change_ffns(monkeypatch, lambda _, identity: identity)
    with pytest.raises(DeploymentError, match='computes something else'):
        slab_det.deploy(model)


def test_a_model_without_maps_is_deployed_with_a_warning(logged):
    assert not hasattr(slab_det.deploy(own_backbone(returned=lambda maps: ())), 'deployment_check')
    assert 'could not check OwnPVT: its features are no tensors' in logged.text


@pytest.mark.parametrize('dtype', HALF, ids=str)
def test_a_model_in_half_precision_is_compared_in_half_precision(monkeypatch, dtype):
    model = own_backbone().to(dtype)
    slab_det.deploy(model)
    # Differences of 4 to 10 times the rounding were accepted.
    scale = 1 + 6 * slab_det.deploy(model).deployment_check.rounding
    change_ffns(monkeypatch, lambda output, _: output * scale)
    with pytest.raises(DeploymentError, match='computes something else'):
        slab_det.deploy(copy.deepcopy(model))


def test_autocast_does_not_weaken_the_comparison():
    with torch.autocast('cpu', torch.bfloat16):
        assert slab_det.deploy(own_backbone()).deployment_check.difference < 1e-6


def test_kernels_that_round_more_than_those_of_the_original_are_accepted():
    model = own_backbone(nn.Sequential(nn.Conv2d(8, 128, 1), nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(8, 128)))
    # The norm takes the mean away, which PyTorch does with fewer digits in channels-last maps.
    model.change[1].bias.data.fill_(20.0)
    assert slab_det.deploy(model).deployment_check.difference < 1e-3


def test_one_wrong_value_is_refused(monkeypatch):
    def change(output, identity):
        output = output.clone()
        output[0, 5, 3] += 1.0
        return output

    change_ffns(monkeypatch, change)
    with pytest.raises(DeploymentError, match='computes something else'):
        slab_det.deploy(own_backbone())


def test_other_threads_may_use_a_model_that_is_deployed(small_detector):
    model, seen = slab_det.fuse(small_detector('faster_rcnn')), []
    limits = [part.test_cfg.max_per_img for part in (model.rpn_head, model.roi_head)]
    # What a thread would see that detects meanwhile.
    model.neck.register_forward_hook(
        lambda *_: seen.append([model.rpn_head.test_cfg.max_per_img, model.roi_head.test_cfg.max_per_img])
    )
    slab_det.deploy(model)
    assert len(seen) > 3 and all(found == limits for found in seen), seen
