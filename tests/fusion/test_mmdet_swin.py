"""Stock mmdet SwinTransformer with our norms: it trains, recalibrates and fuses exactly."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import random_sizes, randomize, raw_outputs
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import SwinTransformer
from mmdet.models.backbones.swin import ShiftWindowMSA, WindowMSA
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

import slab_det
from slab_det.attention.window_attention import ShiftedWindowAttention
from slab_det.fusion import save_fused, stock_mmdet
from slab_det.fusion.verify import verify_fusion
from slab_det.norms import ChannelAffine, OfflineNorm

NORMS = ['TokenBN', 'RepBN', 'PRepBN', 'UN', 'MABN', 'PowerNorm']
SMALL = dict(type='SwinTransformer', embed_dims=8, depths=(2, 2, 4, 2), num_heads=(1, 2, 2, 4), window_size=7)
# Maps of 19 x 26, 10 x 13, 5 x 7 and 3 x 4 tokens: padded to windows of 7 in height and width, odd in both.
SIZE = (75, 102)
OPTIONS = {
    'qk_scale': dict(qk_scale=0.3),
    'no patch_norm': dict(patch_norm=False),
    'absolute positions': dict(use_abs_pos_embed=True, pretrain_img_size=(76, 104)),
    'no qkv_bias': dict(qkv_bias=False),
    'with_cp': dict(with_cp=True),
    'window 4, odd strides': dict(window_size=4, strides=(4, 2, 3, 2)),
    'out_indices': dict(out_indices=(1, 3)),
}


def assert_same_outputs(fused, model, sizes):
    for i, (height, width) in enumerate(sizes):
        images = torch.randn(1 + i % 2, 3, height, width).double()
        outputs, references = raw_outputs(fused, images), raw_outputs(model, images)
        assert len(references) == len(images) + 3
        for output, reference in zip(outputs, references, strict=True):
            difference = (output - reference).abs().max() / reference.abs().max()
            assert difference <= 1e-9, (height, width, difference)


def small_backbone(**options):
    return MODELS.build({**SMALL, 'norm_cfg': dict(type='PRepBN'), **options})


def set_mode(model, mode):
    # mmdet's Swin returns None from train() and eval().
    model.train(mode)
    return model


@pytest.fixture
def stock_detector(small_detector):
    """A function: a small detector on a stock Swin with random weights and statistics, float64, in eval mode."""

    def build(norm='PRepBN', **options):
        return small_detector(**{**SMALL, 'norm_cfg': dict(type=norm), **options}).double()

    return build


def test_mmdets_eval_returns_nothing():
    assert small_backbone().eval() is None, 'the comments that say so, and FusedDetector, can be simplified'


@pytest.mark.parametrize('norm', NORMS)
def test_fused_detector_computes_the_same_with_every_norm(stock_detector, norm):
    model = stock_detector(norm)
    fused = slab_det.fuse(model)
    assert {fate.fate for fate in fused.fusion_report.norms} == {'folded'}, str(fused.fusion_report)
    assert not [m for m in fused.modules() if isinstance(m, (OfflineNorm, ChannelAffine))]
    assert_same_outputs(fused, model, [SIZE, *random_sizes(2, seed=NORMS.index(norm))])


@pytest.mark.parametrize('options', OPTIONS)
def test_fused_detector_computes_the_same_with_every_option(stock_detector, options):
    model = stock_detector(**OPTIONS[options])
    fused = slab_det.fuse(model)
    assert {fate.fate for fate in fused.fusion_report.norms} == {'folded'}, str(fused.fusion_report)
    assert not [m for m in fused.modules() if isinstance(m, (OfflineNorm, ChannelAffine))]
    # Stock Swin takes absolute positions at one size of the map only.
    sizes = [(76, 104), (73, 101)] if options == 'absolute positions' else [SIZE, *random_sizes(1, seed=7)]
    assert_same_outputs(fused, model, sizes)


def test_fused_features_keep_law_1_in_float32(stock_detector):
    model = stock_detector().float()
    check = verify_fusion(model, slab_det.fuse(model), [torch.randn(1, 3, *size) for size in (SIZE, (61, 140))])
    assert check.exact and check.float32 > 0, check


def test_padding_tokens_keep_the_unfused_bias(stock_detector):
    """Without it, maps that are no multiple of the window differ, others do not."""
    model = stock_detector()
    fused = slab_det.fuse(model)
    paddings = [m for m in fused.modules() if hasattr(m, 'padding_qkv')]
    assert len(paddings) == sum(SMALL['depths'])
    for block, stock in zip(
        (b for s in fused.backbone.stages for b in s.blocks),
        (b for s in model.backbone.stages for b in s.blocks),
        strict=True,
    ):
        assert torch.equal(block.attn.w_msa.padding_qkv, stock.attn.w_msa.qkv.bias)
        block.attn.w_msa.padding_qkv = None
    with torch.no_grad():
        for side, same in ((224, True), (225, False)):
            images = torch.randn(1, 3, side, side).double()
            outputs, references = fused.extract_feat(images), model.extract_feat(images)
            difference = max((a - b).abs().max().item() for a, b in zip(outputs, references, strict=True))
            assert (difference < 1e-9) == same, (side, difference)


def test_a_bare_backbone_keeps_its_output_norms_as_affine():
    backbone = set_mode(small_backbone().double(), False)
    randomize(backbone, 0)
    slab_det.set_gamma(backbone, 0)
    fused = slab_det.fuse(backbone)
    assert [fate.norm for fate in fused.fusion_report.select('affine')] == [f'norm{i}' for i in range(4)]
    images = torch.randn(2, 3, *SIZE).double()
    with torch.no_grad():
        for ours, theirs in zip(fused(images), backbone(images), strict=True):
            assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


def test_a_layer_norm_swin_passes_through_untouched(stock_detector):
    model = stock_detector('LN')
    fused = slab_det.fuse(model)
    assert {fate.fate for fate in fused.fusion_report.norms} == {'kept'}
    assert len(fused.fusion_report.norms) == 1 + 2 * 10 + 3 + 4
    assert [type(m) for m in fused.modules()] == [type(m) for m in model.modules()]
    images = torch.randn(1, 3, *SIZE).double()
    for output, reference in zip(raw_outputs(fused, images), raw_outputs(model, images), strict=True):
        assert torch.equal(output, reference)


def test_only_the_attention_behind_an_offline_norm_is_replaced(stock_detector):
    model = stock_detector()
    for block in model.backbone.stages[1].blocks:
        block.norm1 = nn.LayerNorm(16).double().eval()
    fused = slab_det.fuse(model)
    kinds = [{type(block.attn) for block in stage.blocks} for stage in fused.backbone.stages]
    assert kinds == [{ShiftedWindowAttention}, {ShiftWindowMSA}, {ShiftedWindowAttention}, {ShiftedWindowAttention}]
    assert [fate.norm for fate in fused.fusion_report.select('kept')] == [
        f'backbone.stages.1.blocks.{i}.norm1' for i in range(2)
    ]
    assert_same_outputs(fused, model, [SIZE])


class CountingWindowMSA(WindowMSA):
    def forward(self, x, mask=None):
        self.sum = x.sum()
        return super().forward(x, mask)


class DoublingFFN(FFN):
    def forward(self, x, identity=None):
        return super().forward(x, identity) + x


@pytest.mark.parametrize(
    'part, kind, norm',
    [
        ('attn', type('OtherAttention', (ShiftWindowMSA,), {}), 'norm1'),
        ('attn.w_msa', CountingWindowMSA, 'norm1'),
        ('ffn', DoublingFFN, 'norm2'),
    ],
)
def test_an_unknown_reader_of_a_norm_leaves_it_as_affine(stock_detector, part, kind, norm):
    model = stock_detector()
    model.backbone.stages[0].blocks[1].get_submodule(part).__class__ = kind
    fused = slab_det.fuse(model)
    left = {fate.norm: fate.reason for fate in fused.fusion_report.select('affine')}
    assert left.keys() == {f'backbone.stages.0.blocks.1.{norm}'}
    assert kind.__name__ in left.popitem()[1]
    assert type(fused.backbone.stages[0].blocks[1].get_submodule(part)) is kind
    assert_same_outputs(fused, model, [SIZE])


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('shift', [0, 3])
def test_replaced_attention_is_the_same_layer(shift, training):
    theirs = (
        ShiftWindowMSA(
            8,
            2,
            7,
            shift,
            qk_scale=0.7,
            attn_drop_rate=0.1,
            proj_drop_rate=0.2,
            dropout_layer=dict(type='DropPath', drop_prob=0.3),
        )
        .double()
        .train(training)
    )
    randomize(theirs, 1)
    theirs.w_msa.proj.weight.requires_grad = False
    ours = stock_mmdet.own_attention(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for (name, value), (_, reference) in zip(
        sorted(ours.state_dict(keep_vars=True).items()), sorted(theirs.state_dict(keep_vars=True).items()), strict=True
    ):
        assert value is reference, name
    assert {m.training for m in ours.modules()} == {training}
    assert ours.w_msa.attn_drop_rate == 0.1 and ours.w_msa.proj_drop.p == 0.2 and ours.drop.drop_prob == 0.3
    for drop in (theirs.w_msa.attn_drop, theirs.w_msa.proj_drop):
        drop.p = 0.0
    ours.w_msa.attn_drop_rate = ours.drop.drop_prob = 0.0
    x = torch.randn(2, 10 * 17, 8).double().requires_grad_()
    outputs = [attn(x, (10, 17)) for attn in (ours, theirs)]
    gradients = [torch.autograd.grad(F.softplus(out).sum(), x)[0] for out in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_recomputation_changes_nothing():
    """mmdet's with_cp is the reentrant kind: gradients and running statistics as without."""
    plain, recomputed = (
        set_mode(small_backbone(with_cp=with_cp, drop_path_rate=0.0).double(), True) for with_cp in (False, True)
    )
    randomize(plain, 2)
    slab_det.set_gamma(plain, 0.5)
    recomputed.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, *SIZE).double()
    for model in (plain, recomputed):
        assert isinstance(model, SwinTransformer)
        sum(out.square().mean() for out in model(images)).backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)
    for (name, one), (_, other) in zip(plain.named_buffers(), recomputed.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize('norm', NORMS)
def test_a_stock_swin_trains_recalibrates_and_fuses(norm):
    backbone = small_backbone(
        norm_cfg=dict(type=norm),
        depths=(2, 2),
        num_heads=(1, 2),
        strides=(4, 2),
        out_indices=(0, 1),
        drop_path_rate=0.3,
    ).double()
    backbone.init_weights()
    slab_det.set_gamma(backbone, 0.5)
    before = copy.deepcopy(backbone.state_dict())
    optimizer = torch.optim.AdamW(set_mode(backbone, True).parameters(), lr=1e-2)
    sum(out.square().mean() for out in backbone(torch.randn(2, 3, *SIZE).double())).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
    optimizer.step()
    still = {
        key
        for key, value in backbone.state_dict().items()
        if key.endswith(('weight', 'bias', 'eta', 'running_var')) and torch.equal(value, before[key])
    }
    assert not still

    set_mode(backbone, False)
    slab_det.set_gamma(backbone, 0)
    batches = [torch.randn(1, 3, 64, 90).double() + i for i in range(3)]
    report = slab_det.recalibrate(backbone, batches, max_passes=60, tol=1e-10, progress=False)
    # 1 patch embedding, 2 per block, 1 merging, 2 outputs
    assert report.converged and report.num_norms == 1 + 2 * 4 + 1 + 2, report
    last, seen = backbone.stages[1].blocks[1].norm2, []
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in batches:
            backbone(batch)
    handle.remove()
    tokens, (mean, var) = torch.cat(seen), last.statistics()
    second_moment = tokens.square().mean(0)
    # UN, MABN and PowerNorm know no mean.
    torch.testing.assert_close(var + mean.square(), second_moment, rtol=1e-6, atol=1e-6)

    fused = slab_det.fuse(backbone)
    with torch.no_grad():
        for ours, theirs in zip(fused(batches[0]), backbone(batches[0]), strict=True):
            assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


def test_a_saved_fused_detector_is_rebuilt(tmp_path, small_detector_cfg, stock_detector):
    fused = slab_det.fuse(stock_detector(qkv_bias=False))
    cfg = small_detector_cfg(**{**SMALL, 'norm_cfg': dict(type='PRepBN'), 'qkv_bias': False})
    checkpoint, config = save_fused(fused, Config(dict(model=cfg)), tmp_path / 'fused.pth')
    rebuilt = MODELS.build(Config.fromfile(config).model).double()
    rebuilt.init_weights()
    state = torch.load(checkpoint, weights_only=True)['state_dict']
    assert state.keys() == rebuilt.state_dict().keys() == fused.state_dict().keys()
    assert 'backbone.stages.0.blocks.0.attn.w_msa.padding_qkv' in state
    rebuilt.load_state_dict(state)
    assert not any(module.training for module in rebuilt.modules())
    images = torch.randn(1, 3, *SIZE).double()
    for output, reference in zip(raw_outputs(rebuilt, images), raw_outputs(fused, images), strict=True):
        assert torch.equal(output, reference)


def test_a_backbone_alone_can_be_rebuilt_fused():
    cfg = dict(SMALL, norm_cfg=dict(type='PRepBN'))
    backbone = set_mode(MODELS.build(cfg), False)
    slab_det.set_gamma(backbone, 0)
    rebuilt = MODELS.build(dict(type='FusedDetector', model=cfg))
    rebuilt.load_state_dict(slab_det.fuse(backbone).state_dict())
