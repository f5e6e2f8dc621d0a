"""Every layout loads completely, and the loaded model computes the outputs of the original model."""

import gzip
import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from conftest import PVT_V2, differing, randomize, relative_difference
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from official import assert_official, official_state
from torch import Tensor, nn

from slab_det.backbones import SLABPVT, SLABCSwin, SLABSwin, SLABViT
from slab_det.checkpoints import load_pretrained
from slab_det.common.errors import CheckpointError
from slab_det.norms import PRepBN

DATA = Path(__file__).parents[1] / 'data'
LN, PREPBN = dict(type='LN'), dict(type='PRepBN')
PVT_PREPBN = dict(type='PRepBN', ln_eps=1e-6)
SLAB = dict(attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(56, 28, 7, 7))
SLAB_CSWIN = dict(
    depths=(2, 4, 18, 1), attention=('sla', 'sla', 'softmax', 'softmax'), stripe_widths=(None, None, 7, None)
)
TINY = dict(num_layers=(2, 2, 2, 2))
COUNTERS = ('.warm', '.iter', '.total_step')

with gzip.open(DATA / 'checkpoint_manifests.json.gz') as file:
    MANIFESTS = json.load(file)


def released_state(name: str) -> dict[str, Tensor]:
    """Random weights in the shapes of a released checkpoint, whose decay is finished."""
    generator = torch.Generator().manual_seed(0)
    state = {key: torch.rand(shape, generator=generator) for key, shape in MANIFESTS[name].items()}
    for key in state:
        if key.endswith(COUNTERS):
            state[key] = torch.tensor(300000 if key.endswith('total_step') else 0)
    return state


@pytest.mark.parametrize(
    ('name', 'layout', 'model', 'config', 'gammas'),
    [
        ('slab_swin_tiny', 'slab_official', SLABSwin, dict(norm_cfg=PREPBN, **SLAB), {0.0}),
        ('swin_tiny_prepbn', 'slab_official', SLABSwin, dict(norm_cfg=PREPBN), {0.0}),
        ('swin_tiny_prepbn', 'slab_official', SwinTransformer, dict(norm_cfg=PREPBN), {0.0}),
        ('swin_tiny_prepbn_wrapped', 'slab_official', SLABSwin, dict(norm_cfg=PREPBN), {0.0}),
        ('microsoft_swin_tiny', 'microsoft_swin', SLABSwin, dict(norm_cfg=PREPBN), {1.0}),
        ('timm_swin_tiny_patch4_window7_224', 'timm_swin', SLABSwin, dict(norm_cfg=LN), set()),
        ('mmdet_swin_tiny', 'native', SLABSwin, dict(norm_cfg=PREPBN), {1.0}),
        ('official_pvt_tiny', 'official_pvt', SLABPVT, TINY, set()),
        ('timm_pvt_v2_b1', 'timm_pvt_v2', SLABPVT, TINY | PVT_V2, set()),
        ('mmdet_pvt_tiny', 'native', SLABPVT, TINY, set()),
        ('mmdet_pvt_v2_b1', 'native', SLABPVT, TINY | PVT_V2, set()),
        ('slab_pvt_tiny', 'slab_official', SLABPVT, dict(TINY, norm_cfg=PVT_PREPBN, attention='sla'), {0.0}),
        ('slab_cswin_tiny', 'slab_official', SLABCSwin, dict(norm_cfg=PREPBN, **SLAB_CSWIN), {0.0}),
        ('pvt_tiny_prepbn_like', 'slab_official', SLABPVT, dict(TINY, norm_cfg=PVT_PREPBN), {0.0}),
        ('deit_tiny_prepbn', 'slab_official', SLABViT, dict(norm_cfg=PVT_PREPBN, out_type='cls_token'), {0.0}),
    ],
)
def test_released_layouts_load_with_nothing_unexpected(name, layout, model, config, gammas):
    backbone = model(**config)
    report = load_pretrained(backbone, {'model': released_state(name)})
    assert report.complete, str(report)
    assert report.format == layout
    assert set(report.gammas.values()) == gammas
    assert set(report.matched) | set(report.missing) == set(backbone.state_dict()), 'every key is reported'
    for key, norm in backbone.named_modules():
        if isinstance(norm, PRepBN):
            # Output norms are new where the checkpoint is a classifier's, and begin as LayerNorm.
            assert norm.gamma == report.gammas.get(key, 1.0), key
            assert norm.statistics_loaded == (norm.gamma == 0.0), key


def refuse(model: nn.Module, state: dict, match: str) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        load_pretrained(model, state)
    assert not differing(model, before)


@cache
def timm_shapes(name: str) -> dict[str, Tensor]:
    with torch.device('meta'):
        return timm.create_model(name).state_dict()


@pytest.mark.parametrize(
    ('model', 'family'),
    # The output norms of mmdet's Swin have the names of CSWin's; their sizes are refused.
    [(SLABSwin, '(^|_)swin'), (SLABPVT, 'pvt'), (SLABCSwin, 'cswin|mmdet_swin')],
)
def test_other_families_are_refused(model, family):
    backbone = model(embed_dims=8, num_heads=(2, 2, 2, 4))
    states = {
        name: {key: torch.zeros(()).expand(shape) for key, shape in shapes.items()}
        for name, shapes in MANIFESTS.items()
        if not re.search(family, name)
    }
    # swinv2_tiny_window8_256 has the names of Swin, but computes another attention.
    others = ('swinv2_cr_tiny_224', 'swinv2_tiny_window8_256', 'resnet18', 'deit_tiny_patch16_224')
    for state in [*states.values(), *map(timm_shapes, others)]:
        refuse(backbone, state, 'nothing matches the model')


def test_a_running_decay_keeps_its_gamma():
    state = released_state('swin_tiny_prepbn_wrapped')
    state.update({key: torch.tensor(75000) for key in state if key.endswith('.iter')})
    backbone = SLABSwin(norm_cfg=PREPBN)
    assert set(load_pretrained(backbone, state).gammas.values()) == {0.25}
    assert backbone.stages[0].blocks[0].norm1.gamma == 0.25
    lost = {key: value for key, value in state.items() if not key.endswith('.total_step')}
    refuse(backbone, lost, r'norm\d?\.total_step is missing.*iter 75000')


@pytest.mark.parametrize(
    ('name', 'stable_stages'),
    # From its third stage on prepbn_swin_official has logits of 10^6: rounding changes which token wins.
    [('slab_swin_official', 4), ('prepbn_swin_official', 2)],
)
@torch.no_grad()
def test_official_outputs_are_reproduced(name, stable_stages, tmp_path):
    """Our float32 error against the official outputs is at most 3 times the rounding error of these."""
    fixture = torch.load(DATA / f'{name}.pt', weights_only=True)
    path, config = tmp_path / 'official.pth', fixture['config']
    torch.save(fixture['state_dict'], path)
    backbone = SLABSwin(
        embed_dims=config['embed_dim'],
        depths=config['depths'],
        num_heads=config['num_heads'],
        norm_cfg=PREPBN,
        out_norm_cfg=LN,
        norm_eval=True,
        init_cfg=dict(type='Pretrained', checkpoint=str(path)),
        **(SLAB if name.startswith('slab') else {}),
    )
    backbone.init_weights()
    norm = backbone.train().stages[0].blocks[0].norm1
    assert norm.gamma == 0.0 and norm.statistics_loaded and not norm.training, 'norm_eval freezes loaded statistics'
    backbone.eval()
    official = [out.double() for out in fixture['outputs']]

    def relative_distances(outputs):
        return torch.stack(
            [(out.double() - other).norm() / other.norm() for out, other in zip(outputs, official, strict=True)]
        )

    ours = relative_distances(backbone(fixture['input']))
    rounding = relative_distances(backbone.double()(fixture['input'].double()))
    assert rounding[0] < 1e-5, rounding
    assert ours.norm() <= 3 * rounding.norm(), (ours, rounding)
    assert (ours <= 3 * rounding)[:stable_stages].all(), (ours, rounding)


def with_official_eps(model: nn.Module) -> nn.Module:
    """PVT's authors have another eps than mmdet in patch embeddings and reductions."""
    for name, module in model.named_modules():
        if name.endswith(('.0.norm', '.attn.norm')):
            module.eps = 1e-5
    return model


def timm_swin(**options) -> nn.Module:
    """Windows and shifts in every block, for every size of image."""
    small = dict(embed_dim=8, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), num_classes=5, strict_img_size=False)
    model = timm.models.swin_transformer.SwinTransformer(**{**small, 'always_partition': True, **options})
    return randomize(model.double()).eval()


def swin_like(theirs: nn.Module, window_size: int = 7) -> nn.Module:
    """Ours, without norms on the outputs."""
    depths = [len(stage.blocks) for stage in theirs.layers]
    stages = range(len(depths))
    config = dict(embed_dims=8, depths=depths, num_heads=[2**i for i in stages], strides=(4, 2, 2, 2)[: len(depths)])
    return SLABSwin(**config, out_norm_cfg=None, out_indices=stages, window_size=window_size).double().eval()


def timm_features(theirs: nn.Module, image: Tensor) -> list[Tensor]:
    return theirs.forward_intermediates(image, intermediates_only=True, output_fmt='NCHW')


@pytest.mark.parametrize(
    ('options', 'size'),
    [
        (dict(), (224, 224)),
        # Neither maps nor windows are even, and windows fill every map.
        (dict(depths=(2, 2), num_heads=(1, 2), window_size=3), (72, 120)),
        # Windows do not fill the maps: timm and mmdet agree if no window is shifted. Merging pads odd maps.
        (dict(depths=(1, 1, 1, 1)), (92, 116)),
    ],
)
def test_swin_features_equal_timm(options, size):
    theirs = timm_swin(**options)
    ours = swin_like(theirs, options.get('window_size', 7))
    report = load_pretrained(ours, theirs.state_dict())
    assert report.complete and report.format == 'timm_swin', str(report)
    image = torch.randn(2, 3, *size, dtype=torch.float64)
    assert relative_difference(ours(image), timm_features(theirs, image)) < 1e-10


def test_pvt_v2_features_equal_timm():
    config = dict(num_heads=(1, 2, 5, 8))
    theirs = timm.models.pvt_v2.PyramidVisionTransformerV2(
        embed_dims=(8, 16, 40, 64), depths=(1, 2, 1, 1), num_classes=5, **config
    )
    randomize(theirs.double()).eval()
    ours = SLABPVT(embed_dims=8, num_layers=(1, 2, 1, 1), **config, **PVT_V2).double().eval()
    report = load_pretrained(with_official_eps(ours), theirs.state_dict())
    assert report.complete and report.format == 'timm_pvt_v2', str(report)
    image = torch.randn(2, 3, 97, 131, dtype=torch.float64)
    assert relative_difference(ours(image), timm_features(theirs, image)) < 1e-10


DEPTHS = (1, 2, 1, 1)


def small_pvt(kind: str = 'ours', version: int = 1, size: int | tuple = 64, **options) -> nn.Module:
    """A PVT of ours or mmdet's with the sizes of the stored ones."""
    options |= dict(embed_dims=8, num_layers=DEPTHS, num_heads=(1, 2, 2, 4), pretrain_img_size=size)
    if kind == 'ours':
        return SLABPVT(**options, **(PVT_V2 if version == 2 else {})).double().eval()
    return (PyramidVisionTransformer if version == 1 else PyramidVisionTransformerV2)(**options).double().eval()


@pytest.mark.parametrize('kind', ['ours', 'mmdet'])
@pytest.mark.parametrize(('name', 'version'), [('pvt', 1), ('pvt_v2', 2)])
def test_pvt_computes_the_official_features(kind, name, version):
    model = with_official_eps(small_pvt(kind, version))
    report = load_pretrained(model, official_state(name))
    assert report.complete and report.format == 'official_pvt', str(report)
    assert set(report.matched) | set(report.missing) == set(model.state_dict()), str(report)
    blocks = 2 * sum(DEPTHS)
    assert f'linear to 1x1 convolution ({blocks})' in str(report) and f'q and kv packed ({blocks})' in str(report)
    assert ("class token's position dropped (1)" in str(report)) == (version == 1)
    assert_official(model, name)


def timm_vit(**options) -> nn.Module:
    """A small DeiT under the keys of its authors, which are timm's."""
    config = dict(img_size=64, embed_dim=16, depth=2, num_heads=2, num_classes=5, fc_norm=False, **options)
    return randomize(timm.models.vision_transformer.VisionTransformer(**config).double()).eval()


SMALL_VIT = dict(embed_dims=16, num_layers=2, num_heads=2, pretrain_img_size=64)


@torch.no_grad()
def test_vit_features_equal_timm():
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    theirs = timm_vit()
    ours = SLABViT(**SMALL_VIT, out_type='cls_token').double().eval()
    report = load_pretrained(ours, dict(model=theirs.state_dict()))
    assert report.complete and report.format == 'official_vit', str(report)
    assert relative_difference(ours(image), [theirs.forward_features(image)[:, 0]]) < 1e-10

    # Without class token: the token of a file is dropped, and its position too.
    theirs = timm_vit(class_token=False, global_pool='avg')
    state, token = theirs.state_dict(), torch.ones(1, 1, 16)
    table = torch.cat([token, state['pos_embed']], 1)
    ours = SLABViT(**SMALL_VIT).double().eval()
    for weights in (state, state | {'cls_token': token, 'pos_embed': table}):
        report = load_pretrained(ours, weights)
        assert report.complete and ('cls_token' in report.unused) == ('cls_token' in weights), str(report)
        expected = theirs.forward_intermediates(image, indices=1, norm=True, intermediates_only=True)
        assert relative_difference(ours(image), expected) < 1e-10


SLA = dict(norm_cfg=PVT_PREPBN, attention='sla')
SLAB_MODELS = {
    'slab_pvt': (lambda: small_pvt(**SLA), 0),
    'slab_pvt, gamma 0.25': (lambda: small_pvt(**SLA), 0.25),
    'slab_pvt, RepBN': (lambda: small_pvt(**SLA), 0),
    'slab_deit': (lambda: SLABViT(**SMALL_VIT, **SLA), 0),
    'slab_deit, RepBN': (lambda: SLABViT(**SMALL_VIT, **SLA), 0),
    # P is interpolated at sizes that the released code does not take.
    'slab_cswin': (
        lambda: small_cswin((None, None, 3, None), attention=SLAB['attention'], norm_cfg=PREPBN, out_norm_cfg=None),
        0,
    ),
}


@pytest.mark.parametrize('name', SLAB_MODELS)
def test_models_of_slab_compute_the_official_features(name):
    build, gamma = SLAB_MODELS[name]
    model = build().double().eval()
    report = load_pretrained(model, {'model': official_state(name)})
    assert report.complete and report.format == 'slab_official', str(report)
    assert {*report.gammas.values()} == {gamma}, str(report)
    assert set(report.matched) | set(report.missing) == set(model.state_dict()), str(report)
    if 'deit' in name:
        assert report.unused['cls_token'] == 'class token'
    assert_official(model, name)


def small_cswin(widths: tuple, **options) -> nn.Module:
    return SLABCSwin(64, 8, DEPTHS, (2, 2, 4, 4), stripe_widths=widths, **options)


def test_cswin_computes_the_official_features():
    model = small_cswin((1, 3, 3, None)).double().eval()
    report = load_pretrained(model, {'model': official_state('cswin')})
    assert report.complete and report.format == 'microsoft_cswin', str(report)
    assert set(report.matched) == set(model.state_dict()), str(report)
    assert_official(model, 'cswin')


@pytest.mark.parametrize('has_row', [False, True])
@pytest.mark.parametrize('size', [(64, 160), (96, 96), (160, 32)])
def test_only_a_class_tokens_position_is_dropped_from_maps_of_any_shape(size, has_row):
    """Official detectors keep the class token's position without the token."""
    state = {key: value for key, value in official_state('pvt').items() if key != 'cls_token'}
    for stage in range(4):
        # A map of 2x5 has one position more than one of 3x3.
        length = math.prod(side // 2 ** (stage + 2) for side in size) + (has_row and stage == 3)
        key = f'pos_embed{stage + 1}'
        state[key] = torch.randn(1, length, state[key].shape[-1], dtype=torch.float64)
    model = small_pvt(size=size)
    assert load_pretrained(model, state).complete
    assert torch.equal(model.state_dict()['layers.3.1.0.pos_embed'], state['pos_embed4'][:, int(has_row) :])


def test_position_tables_of_another_image_size_are_interpolated_as_in_the_forward():
    state = official_state('pvt')
    same, other = small_pvt(), small_pvt(size=(96, 160))
    load_pretrained(same, state)
    report = load_pretrained(other, state)
    assert report.complete, str(report)
    changes = {key: change for key, change in report.converted.items() if key.endswith('pos_embed')}
    assert len(changes) == 4 and all('position table interpolated' in change for change in changes.values())
    image = torch.randn(1, 3, 96, 160, dtype=torch.float64)
    assert relative_difference(other(image), same(image)) < 1e-10
    # Each value of this table is its row number, so the new rows must be interpolated row numbers, in order.
    ramp = torch.arange(16.0, dtype=torch.float64)[:, None].expand(16, 16).reshape(1, -1, 1)
    load_pretrained(other, state | {'pos_embed1': ramp.expand(-1, -1, 8)})
    got = other.state_dict()['layers.0.1.0.pos_embed'].view(24, 40, 8)
    rows = ((torch.arange(24, dtype=torch.float64) + 0.5) * 16 / 24 - 0.5).clamp(0, 15)
    torch.testing.assert_close(got, rows[:, None, None].expand_as(got))
