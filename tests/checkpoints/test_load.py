"""Checkpoints of every layout arrive whole, or not at all."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import live_tensors
from mmdet.models.backbones import PyramidVisionTransformer, SwinTransformer
from torch import nn

import slab_det
from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.norms import PRepBN
from slab_det.runtime.errors import CheckpointError

DATA = Path(__file__).parents[1] / 'data'
PREPBN, LN = dict(type='PRepBN'), dict(type='LN')
SLAB = dict(attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(56, 28, 7, 7))
SMALL = dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)

with gzip.open(DATA / 'checkpoint_manifests.json.gz') as file:
    MANIFESTS = json.load(file)


def random_state(shapes: dict) -> dict:
    generator = torch.Generator().manual_seed(0)
    state = {key: torch.rand(shape, generator=generator) for key, shape in shapes.items()}
    # A finished decay, as released.
    state.update(
        {
            key: torch.tensor(0 if key.endswith(('.iter', '.warm')) else 300000)
            for key in state
            if key.endswith(('.iter', '.warm', '.total_step'))
        }
    )
    return state


def microsoft_state(model: nn.Module) -> dict:
    """The state dict of an LN ``model`` in Microsoft's key names; values in random channel order, as they come."""
    renames = (
        ('stages.', 'layers.'),
        ('projection', 'proj'),
        ('attn.w_msa', 'attn'),
        ('ffn.layers.0.0', 'mlp.fc1'),
        ('ffn.layers.1', 'mlp.fc2'),
    )
    state = {}
    for key, value in model.state_dict().items():
        for native, microsoft in renames:
            key = key.replace(native, microsoft)
        state[key] = value.clone()
    return state


def unchanged(model: nn.Module, before: dict) -> bool:
    return all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def copy_state(model: nn.Module) -> dict:
    return {key: value.clone() for key, value in model.state_dict().items()}


def official_backbone(name: str) -> tuple[SLABSwin, dict]:
    fixture = torch.load(DATA / f'{name}.pt', weights_only=True)
    config = fixture['config']
    backbone = SLABSwin(
        embed_dims=config['embed_dim'],
        depths=config['depths'],
        num_heads=config['num_heads'],
        norm_cfg=PREPBN,
        out_norm_cfg=LN,
        **(SLAB if name.startswith('slab') else {}),
    ).eval()
    report = load_pretrained(backbone, fixture['state_dict'])
    assert report.complete, str(report)
    assert report.format == 'slab_official'
    assert set(report.gammas.values()) == {0.0}
    return backbone, fixture


@torch.no_grad()
def forward(backbone: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    """The outputs in float64, computed in the precision of the backbone."""
    return [out.double() for out in backbone(image.to(backbone.patch_embed.projection.weight.dtype))]


@pytest.mark.parametrize(
    ('name', 'stable_stages'),
    # From its third stage on this one has logits of 10^6, where one rounding lets another token win.
    [('slab_swin_official', 4), ('prepbn_swin_official', 2)],
)
def test_official_outputs_are_reproduced(name, stable_stages):
    """Ours is at most 3 times as far from the official float32 outputs as those are from exact arithmetic."""
    backbone, fixture = official_backbone(name)
    official = [out.double() for out in fixture['outputs']]

    def relative_distances(outputs):
        return torch.stack([(out - other).norm() / other.norm() for out, other in zip(outputs, official, strict=True)])

    ours = relative_distances(forward(backbone, fixture['input']))
    rounding = relative_distances(forward(backbone.double(), fixture['input']))
    assert rounding[0] < 1e-5, rounding
    assert ours.norm() <= 3 * rounding.norm(), (ours, rounding)
    assert (ours <= 3 * rounding)[:stable_stages].all(), (ours, rounding)


PVT_PREPBN = dict(type='PRepBN', ln_eps=1e-6)
V2 = dict(
    patch_sizes=(7, 3, 3, 3), paddings=(3, 1, 1, 1), use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True
)
TINY, LARGER = dict(num_layers=(2, 2, 2, 2)), dict(num_layers=(3, 4, 6, 3))


@pytest.mark.parametrize(
    ('name', 'layout', 'model', 'config', 'gammas'),
    [
        ('slab_swin_tiny', 'slab_official', SLABSwin, dict(norm_cfg=PREPBN, **SLAB), {0.0}),
        ('swin_tiny_prepbn', 'slab_official', SLABSwin, dict(norm_cfg=PREPBN), {0.0}),
        ('swin_tiny_prepbn', 'slab_official', SwinTransformer, dict(norm_cfg=PREPBN), {0.0}),
        ('swin_tiny_prepbn', 'slab_official', SLABSwin, dict(norm_cfg=dict(type='RepBN')), set()),
        ('swin_tiny_prepbn_wrapped', 'slab_official', SLABSwin, dict(norm_cfg=PREPBN), {0.0}),
        ('swin_tiny_prepbn_wrapped', 'slab_official', SLABSwin, dict(norm_cfg=dict(type='RepBN')), set()),
        ('microsoft_swin_tiny', 'microsoft_swin', SLABSwin, dict(norm_cfg=LN), set()),
        ('microsoft_swin_tiny', 'microsoft_swin', SLABSwin, dict(norm_cfg=PREPBN), {1.0}),
        ('timm_swin_tiny_patch4_window7_224', 'timm_swin', SLABSwin, dict(norm_cfg=LN), set()),
        ('timm_swin_tiny_patch4_window7_224', 'timm_swin', SLABSwin, dict(norm_cfg=PREPBN), {1.0}),
        ('mmdet_swin_tiny', 'native', SLABSwin, dict(norm_cfg=LN), set()),
        ('mmdet_swin_tiny', 'native', SLABSwin, dict(norm_cfg=PREPBN), {1.0}),
        ('official_pvt_tiny', 'official_pvt', SLABPVT, TINY, set()),
        ('official_pvt_small', 'official_pvt', SLABPVT, LARGER, set()),
        ('timm_pvt_v2_b1', 'timm_pvt_v2', SLABPVT, TINY | V2, set()),
        ('mmdet_pvt_tiny', 'native', SLABPVT, TINY, set()),
        ('mmdet_pvt_v2_b1', 'native', SLABPVT, TINY | V2, set()),
        ('slab_pvt_tiny', 'slab_official', SLABPVT, dict(TINY, norm_cfg=PVT_PREPBN, attention='sla'), {0.0}),
        ('slab_pvt_small', 'slab_official', SLABPVT, dict(LARGER, norm_cfg=PVT_PREPBN, attention='sla'), {0.0}),
        ('pvt_tiny_prepbn_like', 'slab_official', SLABPVT, dict(TINY, norm_cfg=PVT_PREPBN), {0.0}),
    ],
)
def test_released_layouts_load_with_nothing_unexpected(name, layout, model, config, gammas):
    backbone = model(**config)
    report = load_pretrained(backbone, {'model': random_state(MANIFESTS[name])})
    assert report.complete, str(report)
    assert report.format == layout
    assert set(report.gammas.values()) == gammas
    accounted = set(report.matched) | set(report.missing_expected)
    assert accounted == set(backbone.state_dict()), 'every key of the model is in the report'
    for key, norm in backbone.named_modules():
        if isinstance(norm, PRepBN):
            # Output norms are new where the checkpoint is a classifier's, and begin as LayerNorm.
            assert norm.gamma == report.gammas.get(key, 1.0), key
            assert norm.statistics_loaded == (norm.gamma == 0.0), key


OTHERS_OF_SWIN = [name for name in MANIFESTS if 'swin_tiny' not in name or 'cswin' in name]
OTHERS_OF_PVT = [name for name in MANIFESTS if 'pvt' not in name]


@pytest.mark.parametrize(
    ('model', 'name'),
    [*((SLABSwin, name) for name in OTHERS_OF_SWIN), *((SLABPVT, name) for name in OTHERS_OF_PVT)],
)
def test_other_families_are_refused(model, name):
    backbone = model(embed_dims=8, num_heads=(1, 2, 2, 4))
    before = copy_state(backbone)
    with pytest.raises(CheckpointError, match='looks like'):
        load_pretrained(backbone, random_state(MANIFESTS[name]))
    assert unchanged(backbone, before)


def test_a_running_decay_keeps_its_gamma():
    state = random_state(MANIFESTS['swin_tiny_prepbn_wrapped'])
    state = {key: torch.tensor(75000) if key.endswith('.iter') else value for key, value in state.items()}
    backbone = SLABSwin(norm_cfg=PREPBN)
    assert set(load_pretrained(backbone, state).gammas.values()) == {0.25}
    assert backbone.stages[0].blocks[0].norm1.gamma == 0.25
    with pytest.raises(CheckpointError, match=r'gamma 0\.25.*norm_cfg'):
        load_pretrained(SLABSwin(norm_cfg=dict(type='RepBN')), state)


def test_patch_merging_order_against_the_formula():
    """Microsoft's PatchMerging, written out, on the weights before conversion; mmdet's Swin on those after."""
    torch.manual_seed(0)
    model = SwinTransformer(**SMALL).double()
    merging = model.stages[0].downsample
    norm, reduction = torch.rand(2, 32).double(), torch.rand(16, 32).double()
    state = microsoft_state(model)
    state.update(
        {
            'layers.0.downsample.norm.weight': norm[0],
            'layers.0.downsample.norm.bias': norm[1],
            'layers.0.downsample.reduction.weight': reduction,
        }
    )
    load_pretrained(model, state)
    x = torch.rand(2, 6, 10, 8).double()
    slices = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
    merged = torch.cat(slices, -1)
    mean, var = merged.mean(-1, keepdim=True), merged.var(-1, unbiased=False, keepdim=True)
    expected = ((merged - mean) / (var + 1e-5).sqrt() * norm[0] + norm[1]) @ reduction.T
    got, hw_shape = merging(x.flatten(1, 2), (6, 10))
    assert hw_shape == (3, 5)
    torch.testing.assert_close(got, expected.flatten(1, 2), rtol=1e-10, atol=1e-10)


def test_statistics_of_patch_merging_are_reordered_with_its_weights():
    backbone = SLABSwin(norm_cfg=PREPBN, **SLAB)
    state = random_state(MANIFESTS['slab_swin_tiny'])
    load_pretrained(backbone, state)
    fitted = backbone.state_dict()
    for ours, theirs in (
        ('running_mean', 'bn.running_mean'),
        ('running_var', 'bn.running_var'),
        ('weight', 'bn.weight'),
        ('bias', 'bn.bias'),
    ):
        given = state[f'layers.1.downsample.norm.norm2.{theirs}'].view(4, 192)
        for channel, place in ((0, 0), (7, 1), (191, 3)):
            # Slices stand column by column, mmdet's places row by row.
            slice_index = (0, 2, 1, 3)[place]
            norm = fitted[f'stages.1.downsample.norm.repbn.{ours}']
            assert norm[channel * 4 + place] == given[slice_index, channel], (ours, channel, place)


@pytest.mark.parametrize(
    ('source', 'target', 'lost'),
    [
        ('RepBN', 'PRepBN', 'running_var'),
        ('RepBN', 'RepBN', 'running_mean'),
        ('TokenBN', 'PRepBN', 'running_var'),
        ('TokenBN', 'TokenBN', 'running_var'),
        ('PRepBN', 'PRepBN', 'running_mean'),
        ('PRepBN', 'RepBN', 'running_var'),
    ],
)
def test_own_norms_without_statistics_are_named(source, target, lost):
    kind = source.replace('Token', 'Batch').replace('BatchBN', 'BatchNorm')
    source, target = (SLABSwin(norm_cfg=dict(type=name), **SMALL) for name in (source, target))
    slab_det.set_gamma(source, 0.0)
    state = {key: value for key, value in copy_state(source).items() if not key.endswith(lost)}
    with pytest.raises(CheckpointError, match=rf'norm: the checkpoint holds a {kind} without {lost} '):
        load_pretrained(target, state)


COUNTERS = ('.warm', '.iter', '.total_step')


def test_a_wrapped_file_without_counters_is_a_finished_decay():
    state = random_state(MANIFESTS['swin_tiny_prepbn_wrapped'])
    stripped = {key: value for key, value in state.items() if not key.endswith(COUNTERS)}
    expected, backbone, plain = (
        SLABSwin(norm_cfg=PREPBN),
        SLABSwin(norm_cfg=PREPBN),
        SLABSwin(norm_cfg=dict(type='RepBN')),
    )
    load_pretrained(expected, state)
    report = load_pretrained(backbone, stripped)
    assert report.complete and report.format == 'slab_official', str(report)
    assert set(report.gammas.values()) == {0.0}
    count = sum(key.endswith('.total_step') for key in state)
    assert any(note.startswith(f'{count} progressive norms have no counters') for note in report.notes), str(report)
    norms = [key for key in expected.state_dict() if 'norm' in key and not re.match(r'norm\d', key)]
    assert any(key.endswith('ln.weight') for key in norms)
    for key in norms:
        assert torch.equal(backbone.state_dict()[key], expected.state_dict()[key]), key
    assert load_pretrained(plain, stripped).complete


def test_a_block_of_layernorm_and_plain_repbn_is_not_one_progressive_norm():
    state = random_state(MANIFESTS['swin_tiny_prepbn'])
    for key in [key for key in state if key.startswith('layers.0.blocks.0.norm1.')]:
        del state[key]
    state.update({f'layers.0.blocks.0.norm1.{name}': torch.rand(96) for name in ('weight', 'bias')})
    report = load_pretrained(SLABSwin(norm_cfg=PREPBN), state)
    assert report.complete, str(report)
    assert report.gammas['stages.0.blocks.0.norm1'] == 1.0
    assert report.gammas['stages.0.blocks.0.norm2'] == 0.0


def test_a_running_decay_without_its_length_is_an_error():
    state = random_state(MANIFESTS['swin_tiny_prepbn_wrapped'])
    state = {
        key: torch.tensor(5) if key.endswith('.iter') else value
        for key, value in state.items()
        if not key.endswith('.total_step')
    }
    with pytest.raises(CheckpointError, match=r'norm\d?\.total_step is missing.*iter 5'):
        load_pretrained(SLABSwin(norm_cfg=PREPBN), state)


@pytest.mark.parametrize('name', ['swin_tiny_prepbn', 'swin_tiny_prepbn_wrapped'])
@pytest.mark.parametrize('lost', [('running_mean',), ('running_var',), ('running_mean', 'running_var')], ids=str)
@pytest.mark.parametrize('target', ['PRepBN', 'RepBN'])
def test_official_norms_without_statistics_are_named(name, lost, target):
    state = {key: value for key, value in random_state(MANIFESTS[name]).items() if not key.endswith(lost)}
    backbone = SLABSwin(norm_cfg=dict(type=target))
    before = copy_state(backbone)
    with pytest.raises(CheckpointError, match=rf'norm: .*RepBN without {" and ".join(lost)} \(it has patch_embed'):
        load_pretrained(backbone, state)
    assert unchanged(backbone, before)


def randomised(model: nn.Module) -> nn.Module:
    for name, value in live_tensors(model).items():
        if value.is_floating_point() and not name.endswith('_gamma'):
            value.copy_(torch.rand_like(value) + 0.5)
    return model.eval()


@pytest.mark.parametrize(
    ('source', 'target'), [('TokenBN', 'RepBN'), ('TokenBN', 'PRepBN'), ('RepBN', 'PRepBN'), ('PRepBN', 'RepBN')]
)
def test_offline_norms_exchange_exactly(source, target):
    torch.manual_seed(0)
    source, target = (SLABSwin(norm_cfg=dict(type=name), **SMALL).double() for name in (source, target))
    randomised(source)
    for norm in source.modules():
        if isinstance(norm, PRepBN):
            norm.gamma = 0.0
    report = load_pretrained(target.eval(), copy_state(source))
    assert report.complete, str(report)
    x = torch.rand(1, 3, 45, 61).double()
    for ours, theirs in zip(target(x), source(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert target.norm0.statistics_loaded


def test_layernorm_weights_start_batch_norms_and_the_report_says_so():
    target = SLABSwin(norm_cfg=dict(type='TokenBN'), norm_eval=True, **SMALL)
    source = randomised(SLABSwin(norm_cfg=LN, **SMALL))
    report = load_pretrained(target, copy_state(source))
    assert any('statistics are not loaded' in note for note in report.notes), str(report)
    assert torch.equal(target.norm0.weight, source.norm0.weight)
    assert target.train().norm0.training, 'statistics that were not loaded must stay live'


def test_tables_of_another_window_are_interpolated():
    small, large = (SLABSwin(**{**SMALL, 'window_size': size}, attention=('sla', 'softmax')) for size in (4, 6))
    nn.init.constant_(small.stages[0].blocks[0].attn.w_msa.positional_encoding, 0.5)
    nn.init.constant_(small.stages[1].blocks[0].attn.w_msa.relative_position_bias_table, 0.25)
    report = load_pretrained(large, copy_state(small))
    assert report.complete, str(report)
    table = large.stages[0].blocks[0].attn.w_msa.positional_encoding
    assert table.shape == (1, 36, 8)
    torch.testing.assert_close(table, torch.full_like(table, 0.5))
    table = large.stages[1].blocks[0].attn.w_msa.relative_position_bias_table
    assert table.shape == (121, 2)
    torch.testing.assert_close(table, torch.full_like(table, 0.25))
    changes = set(report.converted.values())
    assert changes == {'position table interpolated'}


def test_interpolated_tables_keep_rows_and_columns_apart():
    small, large = (SLABSwin(**{**SMALL, 'window_size': size}) for size in (4, 6))
    rows = torch.arange(7.0)[:, None].expand(7, 7).reshape(49, 1)
    for block in small.stages[0].blocks:
        block.attn.w_msa.relative_position_bias_table.data.copy_(rows)
    load_pretrained(large, copy_state(small))
    table = large.stages[0].blocks[0].attn.w_msa.relative_position_bias_table.view(11, 11)
    assert (table.diff(dim=0) > 0).all()
    torch.testing.assert_close(table, table[:, :1].expand(11, 11))


@pytest.mark.parametrize(
    'wrap',
    [
        lambda state: state,
        lambda state: {'state_dict': state},
        lambda state: {'model': state},
        lambda state: {f'module.{key}': value for key, value in state.items()},
        lambda state: {
            'state_dict': {f'backbone.{key}': value for key, value in state.items()}
            | {'neck.lateral_convs.0.conv.weight': torch.zeros(1)}
        },
        lambda state: {f'module.backbone.{key}': value for key, value in state.items()},
    ],
)
def test_wrappers_and_prefixes_come_off(wrap):
    source, target = SLABSwin(**SMALL), SLABSwin(**SMALL)
    nn.init.uniform_(source.norm0.weight)
    report = load_pretrained(target, wrap(copy_state(source)))
    assert report.complete, str(report)
    assert unchanged(target, source.state_dict())


def test_surplus_and_missing_weights_are_reported():
    deep = SLABSwin(**{**SMALL, 'depths': (2, 4)})
    report = load_pretrained(SLABSwin(**SMALL), copy_state(deep))
    assert not report.complete
    assert all(re.match(r'stages\.1\.blocks\.[23]\.', key) for key in report.unused_unexpected)
    report = load_pretrained(deep, copy_state(SLABSwin(**SMALL)))
    assert {key.rsplit('.', 1)[0].split('.')[3] for key in report.missing_unexpected} == {'2', '3'}


def test_source_overrides_and_is_checked():
    state = copy_state(SLABSwin(**SMALL))
    assert load_pretrained(SLABSwin(**SMALL), state, source='native').complete
    with pytest.raises(ValueError, match='unknown source'):
        load_pretrained(SLABSwin(**SMALL), state, source='timm')


@pytest.mark.parametrize('model', [SLABSwin, SwinTransformer, SLABPVT, PyramidVisionTransformer])
def test_a_fused_checkpoint_needs_a_fused_model(model):
    def unfused():
        small = SMALL if 'Swin' in model.__name__ else dict(num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
        backbone = model(**{**small, 'embed_dims': 8}, norm_cfg=dict(type='RepBN'))
        backbone.eval()  # mmdet's Swin returns None
        return backbone

    fused, normed = slab_det.fuse(unfused()), copy_state(unfused())
    state = copy_state(fused)
    for checkpoint in (dict(state_dict=state, meta=dict(fused=True)), state):
        with pytest.raises(CheckpointError, match='is fused: it has no norms'):
            load_pretrained(unfused(), checkpoint)
    with pytest.raises(CheckpointError, match='is not fused'):
        load_pretrained(fused, normed)
    assert load_pretrained(fused, state).complete


EMA = 'ema.backbone.'


@pytest.mark.parametrize('prefix', [EMA, 'ema.backbone', 'module.ema.backbone.'])
@pytest.mark.parametrize('way', ['load_pretrained', 'init_cfg'])
def test_a_prefix_chooses_among_several_backbones(tmp_path, prefix, way):
    path = tmp_path / 'both.pth'
    wanted, other = copy_state(randomised(SLABSwin(**SMALL))), copy_state(randomised(SLABSwin(**SMALL)))
    torch.save(
        {f'module.{EMA}{key}': value for key, value in wanted.items()}
        | {f'module.backbone.{key}': value for key, value in other.items()},
        path,
    )
    init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix=prefix)
    target = SLABSwin(**SMALL, init_cfg=init_cfg if way == 'init_cfg' else None)
    if way == 'init_cfg':
        target.init_weights()
    else:
        report = load_pretrained(target, path, prefix=prefix)
        assert report.complete and len(report.unused_expected) > len(other)
    assert unchanged(target, wanted)
    load_pretrained(target, path)
    assert unchanged(target, other)


def test_a_prefix_that_nothing_has_is_an_error():
    with pytest.raises(CheckpointError, match="no weights under the prefix 'ema.backbone.', but norm0.bias"):
        load_pretrained(SLABSwin(**SMALL), copy_state(SLABSwin(**SMALL)), prefix=EMA)


@pytest.mark.parametrize(
    ('init_cfg', 'named'),
    [
        (dict(type='Pretrained', checkpoint='x.pth', strict=True, map_location='cpu'), 'remove map_location, strict'),
        (dict(type='Pretrained'), 'takes init_cfg=None'),
        ([dict(type='Pretrained', checkpoint='x.pth')], 'got'),
    ],
)
def test_options_of_init_cfg_that_nothing_would_read_are_refused(init_cfg, named):
    with pytest.raises(ValueError, match=named):
        SLABSwin(**SMALL, init_cfg=init_cfg).init_weights()


def test_init_cfg_loads_through_the_converter(tmp_path):
    fixture = torch.load(DATA / 'prepbn_swin_official.pt', weights_only=True)
    path = tmp_path / 'official.pth'
    torch.save(fixture['state_dict'], path)
    config = fixture['config']
    backbone = SLABSwin(
        embed_dims=config['embed_dim'],
        depths=config['depths'],
        num_heads=config['num_heads'],
        norm_cfg=PREPBN,
        out_norm_cfg=LN,
        norm_eval=True,
        init_cfg=dict(type='Pretrained', checkpoint=str(path)),
    )
    backbone.init_weights()
    norm = backbone.train().stages[0].blocks[0].norm1
    assert norm.gamma == 0.0
    assert norm.statistics_loaded
    assert not norm.training, 'norm_eval freezes loaded statistics'
