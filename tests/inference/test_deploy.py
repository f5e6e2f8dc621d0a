import copy
import operator
import pickle
from collections import Counter

import pytest
import torch
from conftest import (
    CONFIGS,
    SLA,
    SMALL_PVT,
    SMALL_PVT_V2,
    as_trained,
    differing,
    random_sizes,
    raw_outputs,
    relative_difference,
)
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.runner.checkpoint import load_state_dict
from torch import nn

import slab_det
from slab_det.attention import SoftmaxWindowAttention
from slab_det.backbones.blocks import Block, DeployedPatchMerging, LinearFFN, PatchMerging
from slab_det.common.errors import DeploymentError
from slab_det.inference.cpu import winograd
from slab_det.inference.cpu.roi_align import DeployedRoIAlign
from slab_det.inference.gpu.ffn_kernels import TritonFFN
from slab_det.inference.gpu.layers import FusedFPN, TritonConv

PREPBN, LN = dict(norm_cfg=dict(type='PRepBN')), dict(norm_cfg=dict(type='LN'))
SWIN = dict(
    type='SLABSwin',
    pretrain_img_size=64,
    embed_dims=16,
    depths=(2, 2),
    num_heads=(2, 4),
    strides=(4, 2),
    out_indices=(0, 1),
)
CSWIN = dict(
    type='SLABCSwin', pretrain_img_size=64, embed_dims=16, depths=(1, 1, 2), num_heads=(2, 2, 4), out_indices=(0, 1, 2)
)
BACKBONES = {
    'swin': {**SWIN, **PREPBN},
    'swin, no bias, positions': {**SWIN, **PREPBN, 'qkv_bias': False, 'use_abs_pos_embed': True},
    'swin, windows larger than the map': {**SWIN, **LN, 'window_size': 20},
    'swin, sla': {**SWIN, **PREPBN, 'attention': 'sla'},
    'swin, focused, LayerNorm in the FFN': {**SWIN, **LN, 'attention': 'focused', 'ffn_norm': 'pre_act'},
    'swin, BN+FFNBN': {**SWIN, 'norm_cfg': dict(type='TokenBN'), 'ffn_norm': 'post_act'},
    'swin, ReLU': {**SWIN, **PREPBN, 'act_cfg': dict(type='ReLU')},
    'swin, tanh GELU': {**SWIN, **PREPBN, 'act_cfg': dict(type='GELU', approximate='tanh')},
    'pvt, no bias': {**SMALL_PVT, **PREPBN, 'qkv_bias': False},
    'pvt, sla': {**SMALL_PVT, **LN, 'attention': 'sla'},
    'pvt, focused, reduced': {**SMALL_PVT, **PREPBN, 'attention': 'focused', 'la_sr_ratios': (4, 1)},
    'cswin': {**CSWIN, **PREPBN, 'stripe_widths': (1, 3, 7)},
    'cswin, sla': {**CSWIN, **LN, 'stripe_widths': (None, 2, None), 'attention': ('sla', 'sla', 'softmax')},
    'pvt v2': {**SMALL_PVT_V2, **PREPBN},
}


@pytest.fixture
def fused_backbone():
    """A function that builds a fused backbone with random weights and statistics."""

    def build(name: str) -> nn.Module:
        return slab_det.fuse(as_trained(MODELS.build(copy.deepcopy(BACKBONES[name]))), inplace=True)

    return build


@pytest.fixture(params=['cpu', 'gpu'])
def form(request, monkeypatch) -> str:
    """The device that models are deployed for; both forms run on the CPU here."""
    monkeypatch.setattr('slab_det.inference.deployment._is_on_cpu', lambda model: request.param == 'cpu')
    return request.param


# On a CPU, a GPU kernel falls back to its eager form.
FORMS = {'cpu': BACKBONES, 'gpu': ('swin', 'swin, sla', 'pvt, no bias', 'cswin, sla')}


@pytest.mark.parametrize(
    ('name', 'form'), [(name, form) for form, names in FORMS.items() for name in names], indirect=['form']
)
@torch.no_grad()
def test_deployed_backbone_computes_the_same(fused_backbone, name, form):
    model = fused_backbone(name)
    deployed = slab_det.deploy(model)
    double = slab_det.deploy(copy.deepcopy(model).double())
    for i, size in enumerate([(64, 64), *random_sizes(1, seed=3)]):
        images = torch.randn(1 + i % 2, 3, *size)
        reference = copy.deepcopy(model).double()(images.double())
        difference = relative_difference(double(images.double()), reference)
        assert difference <= 1e-9, (name, size, difference)
        own = relative_difference(model(images), reference)
        difference = relative_difference(deployed(images), reference)
        assert difference <= 10 * own, (name, size, difference, own)


def test_deployed_detector_computes_the_same_and_leaves_its_model_alone(small_detector, monkeypatch, form):
    monkeypatch.setattr(winograd, 'MIN_CHANNELS', 16)
    model = slab_det.fuse(small_detector(**SLA, depths=(2, 1, 1, 1)).double())
    batches = [torch.randn(1, 3, *size).double() for size in random_sizes(2, seed=4)]
    expected = [raw_outputs(model, images) for images in batches]
    state = torch.get_rng_state()
    deployed = slab_det.deploy(model)
    assert torch.equal(torch.get_rng_state(), state), 'random numbers were drawn'
    kinds = Counter(type(module) for module in deployed.modules())
    for_cpus, for_gpus = {DeployedRoIAlign, winograd.WinogradConv}, {TritonConv, FusedFPN, TritonFFN}
    assert kinds.keys() & (for_cpus | for_gpus) == (for_cpus if form == 'cpu' else for_gpus)
    for images, reference in zip(batches, expected, strict=True):
        difference = relative_difference(raw_outputs(deployed, images), reference)
        assert difference <= 1e-9, (images.shape, difference)
        assert all(map(torch.equal, raw_outputs(model, images), reference))
    assert all(p.requires_grad for p in model.parameters())
    assert repr(deployed).count('(downsample): DeployedPatchMerging') == 3
    assert slab_det.deploy(model, inplace=True) is model


@torch.no_grad()
def rounded_layers(model, images, dtype):
    """Feature maps of a float32 model whose weights, and the outputs of whose layers, are rounded to ``dtype``."""
    model = copy.deepcopy(model).to(dtype).float()
    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_hook(lambda module, inputs, output: output.to(dtype).float())
    return model(images.to(dtype).float())


def assert_rounded(found, rounded, reference):
    """Asserts that a form in half precision is as near to float32 as rounding explains, map by map."""
    for level, maps in enumerate(zip(found, rounded, reference, strict=True)):
        ours, expected, exact = (x.double() for x in maps)
        own, usual = ((x - exact).square().mean().sqrt().item() for x in (ours, expected))
        assert own < 4 * usual, (level, own, usual)


@pytest.mark.parametrize('name', ['swin', 'pvt, no bias', 'swin, sla', 'pvt, sla'])
@torch.no_grad()
def test_bfloat16_features_are_as_near_to_float32_as_rounding(fused_backbone, name):
    model, images = fused_backbone(name), torch.randn(2, 3, 90, 110)
    found = slab_det.deploy(model, torch.bfloat16)(images)
    assert {x.dtype for x in found} == {torch.bfloat16}
    assert_rounded(found, rounded_layers(model, images, torch.bfloat16), model(images))


@pytest.mark.parametrize('name', [name for name in BACKBONES if 'sla' not in name])
@torch.no_grad()
def test_float32_form_runs_under_autocast(fused_backbone, name):
    model, images = fused_backbone(name), torch.randn(2, 3, 90, 110)
    reference, deployed = model(images), slab_det.deploy(model)
    with torch.autocast('cpu', torch.bfloat16):
        own, difference = (relative_difference(form(images), reference) for form in (model, deployed))
    assert own > 1e-3 and difference < 3 * own, (name, difference, own)


class OwnAttention(SoftmaxWindowAttention):
    def attend(self, x, windows):
        return super().attend(x, windows) + 1


class OwnLinear(nn.Linear):
    """Adds something to its product, as an adapter does."""

    def forward(self, x):
        return super().forward(x) + x.sum(-1, keepdim=True)


@torch.no_grad()
def test_modified_layers_are_not_replaced(fused_backbone, form):
    model, images = fused_backbone('swin'), torch.randn(1, 3, 64, 64)
    blocks = [block for stage in model.stages for block in stage.blocks]
    blocks[0].attn.w_msa.__class__ = OwnAttention
    seen = []
    blocks[1].attn.w_msa.qkv.register_forward_hook(lambda *_: seen.append(1))
    blocks[2].attn.w_msa.proj.__class__ = blocks[3].ffn.layers[1].__class__ = OwnLinear
    expected = model(images)
    deployed = slab_det.deploy(model)
    seen.clear()
    assert relative_difference(deployed(images), expected) < 1e-4 and seen == [1]
    kinds = [type(block.ffn) for stage in deployed.stages for block in stage.blocks]
    assert kinds == ([TritonFFN] * 3 + [LinearFFN] if form == 'gpu' else [LinearFFN] * 4)


@torch.no_grad()
@pytest.mark.parametrize('norm', ['LN', 'TokenBN'])
@pytest.mark.parametrize(
    ('stock', 'arguments', 'num_blocks', 'has_ffns'),
    [
        ('SwinTransformer', SWIN, 4, True),
        ('PyramidVisionTransformer', SMALL_PVT, 3, True),
        # Its FFNs have a depthwise convolution.
        ('PyramidVisionTransformerV2', dict(embed_dims=8, num_layers=(1, 1, 1, 1), num_heads=(1, 2, 4, 8)), 4, False),
    ],
)
def test_blocks_of_mmdet_are_deployed_too(stock, arguments, num_blocks, has_ffns, norm, form):
    model = as_trained(MODELS.build(dict(arguments, type=stock, norm_cfg=dict(type=norm))))
    model, images = slab_det.fuse(model) if norm != 'LN' else model, torch.randn(2, 3, 72, 103)
    deployed = slab_det.deploy(model)
    assert relative_difference(deployed(images), model(images)) < 1e-4
    kinds = Counter(type(module) for module in deployed.modules())
    assert kinds[Block] == num_blocks and (kinds[TritonFFN] > 0) == (form == 'gpu' and has_ffns)
    found = slab_det.deploy(model, torch.bfloat16)(images)
    assert_rounded(found, rounded_layers(model, images, torch.bfloat16), model(images))


@torch.no_grad()
@pytest.mark.parametrize('kind', ['SwinTransformer', 'SLABSwin'])
def test_block_with_a_norm_over_all_tokens_is_deployed(kind):
    class GlobalNorm(nn.Module):
        def forward(self, x):
            return x / x.norm(dim=1, keepdim=True)

    model = MODELS.build(dict(SWIN, type=kind))
    model.eval()
    model.stages[0].blocks[1].norm2 = GlobalNorm().eval()
    images = torch.randn(1, 3, 64, 64)
    assert relative_difference(slab_det.deploy(model)(images), model(images)) < 1e-4


@pytest.mark.parametrize(
    ('prepare', 'arguments', 'message'),
    [
        (slab_det.fuse, dict(dtype=torch.int8), 'torch.int8.*bfloat16'),
        (lambda model: model, {}, 'not fused .* call slab_det.fuse'),
        (lambda model: slab_det.fuse(model).train(), {}, r'call model.eval\(\)'),
        (lambda model: slab_det.deploy(slab_det.fuse(model)), {}, 'deployed already'),
        (lambda model: nn.DataParallel(slab_det.fuse(model)), {}, 'deploy the model that it wraps'),
    ],
    ids=['dtype', 'unfused', 'training', 'deployed', 'wrapped'],
)
def test_refused_model_is_unchanged(small_detector, prepare, arguments, message):
    model = prepare(small_detector())
    before = {name: (type(module), module.training) for name, module in model.named_modules()}
    gradients = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(DeploymentError, match=message):
        slab_det.deploy(model, inplace=True, **arguments)
    assert {name: (type(module), module.training) for name, module in model.named_modules()} == before
    assert [parameter.requires_grad for parameter in model.parameters()] == gradients


def computes_something_else(monkeypatch):
    """Makes deployed blocks compute something else."""
    monkeypatch.setattr(DeployedPatchMerging, 'forward', lambda self, *args: scaled(PatchMerging.forward(self, *args)))


def scaled(merged):
    tokens, hw_shape = merged
    return tokens * 2, hw_shape


def does_not_run(monkeypatch):
    def fail(self, x, *_):
        raise RuntimeError('view size is not\ncompatible')

    monkeypatch.setattr(DeployedPatchMerging, 'forward', fail)


@pytest.mark.parametrize('inplace', [True, False])
@pytest.mark.parametrize(
    ('fault', 'message'),
    [
        (computes_something_else, r'computes something else {}: .*difference \d.* in \d\d,\d{{3}} values'),
        (does_not_run, r'MaskRCNN does not run {} \(RuntimeError: view size is not compatible\)'),
    ],
)
def test_model_is_unchanged_if_its_deployed_form_is_refused(small_detector, monkeypatch, fault, message, inplace):
    model, image = slab_det.fuse(small_detector(depths=(1, 1, 1, 1))), torch.randn(1, 3, 64, 64)
    expected, kinds = raw_outputs(model, image), [*map(type, model.modules())]
    # What the caller holds: a head, and an optimizer's parameters.
    modules, weights = [*model.modules()], [(p, p.data_ptr(), p.dtype, p.stride()) for p in model.parameters()]
    for dtype, form in ((None, 'in its deployed form'), (torch.bfloat16, 'in torch.bfloat16')):
        with monkeypatch.context() as patch, pytest.raises(DeploymentError, match=message.format(form)):
            fault(patch)
            slab_det.deploy(model, dtype, inplace=inplace)
        assert all(map(operator.is_, model.modules(), modules)) and [*map(type, modules)] == kinds
        assert [(p, p.data_ptr(), p.dtype, p.stride()) for p in model.parameters()] == weights
        assert all(weight[0].requires_grad for weight in weights)
        assert all(map(torch.equal, raw_outputs(model, image), expected))
    assert slab_det.deploy(model, inplace=inplace).deployment_check.difference < 1e-4


def test_former_submodules_of_a_model_deployed_in_place_stay_whole(small_detector):
    model, image = slab_det.fuse(small_detector()), torch.randn(1, 3, 64, 64)
    backbone = model.backbone
    expected = backbone(image)
    assert slab_det.deploy(model, torch.bfloat16, inplace=True) is model
    assert all(map(torch.equal, backbone(image), expected)) and model.backbone is not backbone
    assert model.backbone.patch_embed.projection.weight.dtype == torch.bfloat16


def overflowing_head(model):
    first, second = model.roi_head.bbox_head.shared_fcs
    first.weight.mul_(1e6), first.bias.mul_(1e6)
    second.weight.div_(1e6)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (overflowing_head, 'outputs of its heads'),
        (lambda model: model.neck.fpn_convs[0].conv.bias.fill_(1e6), 'feature maps .* deploy it in float32'),
    ],
)
def test_what_overflows_in_half_precision_is_refused(small_detector, change, message):
    model = slab_det.fuse(small_detector())
    with torch.no_grad():
        change(model)
    with pytest.raises(DeploymentError, match=f'MaskRCNN overflows in torch.float16: {message}'):
        slab_det.deploy(model, torch.float16)


@pytest.mark.parametrize('bare', [True, False], ids=['backbone', 'detector'])
def test_weights_that_are_not_finite_are_refused(small_detector, bare):
    model = slab_det.fuse(small_detector())
    model = model.backbone if bare else model
    next(iter(model.parameters())).data.view(-1)[0] = float('nan')
    with pytest.raises(DeploymentError, match=r'1 of \d+ tensors hold NaN or infinite'):
        slab_det.deploy(model)


def test_a_model_that_cannot_run_on_a_small_image_is_deployed_with_a_warning(fused_backbone, logged):
    model = fused_backbone('swin')
    model.patch_embed.projection = nn.Conv2d(3, 16, 80, 4)
    model.eval()
    assert not hasattr(slab_det.deploy(model), 'deployment_check')
    assert 'could not check SLABSwin: the original does not run on an image of 64x128' in logged.text


@pytest.mark.parametrize(
    'use',
    [
        lambda model, x: model.train()(x),
        torch.jit.trace,
        pytest.param(
            lambda model, x: torch.export.export(model, (x,)),
            marks=pytest.mark.skipif(not hasattr(torch.compiler, 'is_exporting'), reason='PyTorch 2.6 cannot tell'),
        ),
        lambda model, x: model(x.requires_grad_()),
    ],
    ids=['train', 'trace', 'export', 'gradients'],
)
def test_deployed_model_refuses_training_gradients_tracing_and_export(fused_backbone, use):
    deployed = slab_det.deploy(fused_backbone('swin'))
    with pytest.raises(DeploymentError, match='use the fused model'):
        use(deployed, torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize('inplace', [True, False])
def test_deployed_model_takes_no_weights(small_detector, form, inplace):
    model, other = (slab_det.fuse(small_detector(seed=seed)) for seed in (0, 1))
    deployed = slab_det.deploy(copy.deepcopy(model) if inplace else model, inplace=inplace)
    before = copy.deepcopy(deployed.state_dict())
    # Every weight of a bbox_head has the name and shape that it had before.
    for part in ('', 'backbone', 'roi_head.bbox_head'):
        for load in (nn.Module.load_state_dict, load_state_dict):
            for strict in (True, False):
                with pytest.raises(DeploymentError, match='load the checkpoint into the fused model'):
                    load(deployed.get_submodule(part), other.get_submodule(part).state_dict(), strict)
        assert not differing(deployed, before), part
    # Copies refuse too; the model that was deployed takes weights as before.
    for copied in (copy.deepcopy(deployed), pickle.loads(pickle.dumps(deployed))):
        with pytest.raises(DeploymentError, match='is deployed'):
            copied.load_state_dict(before)
    model.load_state_dict(other.state_dict())
    assert not differing(model, other)


def test_rounding_amplified_by_an_untrained_model_without_norms_is_accepted():
    cfg = Config.fromfile(CONFIGS / 'mask_rcnn_slab_swin_t.py').model
    cfg.backbone.init_cfg = None
    model = MODELS.build(cfg).eval()
    slab_det.set_gamma(model, 0.0)
    check = slab_det.deploy(slab_det.fuse(model)).deployment_check
    # A trained Swin-T has 2e-7.
    assert check.difference > 1e-3 and check.num_values > 1e5
