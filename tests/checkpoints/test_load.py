"""Backbones load weights whatever wraps them: prefixes, position tables, fusion, ``init_cfg``."""

import re

import pytest
import torch
from conftest import differing
from mmdet.models.backbones import PyramidVisionTransformer, SwinTransformer
from torch import nn

import slab_det
from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.common.errors import CheckpointError

SMALL = dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)


def random_state(model: nn.Module) -> dict:
    return {
        key: torch.rand_like(value) + 0.5 if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }


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
        lambda state: {f'module.module.{key}': value for key, value in state.items()},
        lambda state: {f'module._orig_mod.{key}': value for key, value in state.items()},
        lambda state: {f'backbone._orig_mod.{key}': value for key, value in state.items()},
        lambda state: {'model_ema': state, 'optimizer': {}},
    ],
)
def test_wrappers_and_prefixes_come_off(wrap):
    target = SLABSwin(**SMALL)
    state = random_state(target)
    report = load_pretrained(target, wrap(state))
    assert report.complete, str(report)
    assert not differing(target, state)


@pytest.mark.parametrize('prefix', ['ema.backbone.', 'ema.backbone', 'module.ema.backbone.'])
@pytest.mark.parametrize('way', ['load_pretrained', 'init_cfg'])
def test_a_prefix_chooses_among_several_backbones(tmp_path, prefix, way):
    path = tmp_path / 'both.pth'
    target = SLABSwin(**SMALL, init_cfg=dict(type='Pretrained', checkpoint=str(path), prefix=prefix))
    wanted, other = random_state(target), random_state(target)
    both = {f'module.ema.backbone.{key}': value for key, value in wanted.items()}
    torch.save(both | {f'module.backbone.{key}': value for key, value in other.items()}, path)
    if way == 'init_cfg':
        target.init_weights()
    else:
        report = load_pretrained(target, path, prefix=prefix)
        assert report.complete and len(report.unused) > len(other)
    assert not differing(target, wanted)
    load_pretrained(target, path)
    assert not differing(target, other)


def test_a_prefix_that_nothing_has_is_an_error():
    with pytest.raises(CheckpointError, match="'ema.backbone.', but norm0.bias"):
        load_pretrained(SLABSwin(**SMALL), random_state(SLABSwin(**SMALL)), prefix='ema.backbone.')


@pytest.mark.parametrize('prefix', ['model.', 'encoder.', 'student.backbone.'])
def test_weights_behind_a_prefix_are_refused_with_the_prefix_to_give(prefix):
    target = SLABSwin(**SMALL)
    state = random_state(target)
    wrapped = {prefix + key: value for key, value in state.items()} | {'decoder.weight': torch.ones(2)}
    with pytest.raises(CheckpointError, match=rf'load them with prefix={prefix!r}'):
        load_pretrained(target, wrapped)
    load_pretrained(target, wrapped, prefix=prefix)
    assert not differing(target, state)


def test_several_sets_of_weights_are_refused_by_name():
    state = random_state(SLABSwin(**SMALL))
    with pytest.raises(CheckpointError, match='save one of them alone, student, teacher'):
        load_pretrained(SLABSwin(**SMALL), dict(epoch=1, student=state, teacher=state))


def test_weights_that_are_not_finite_are_refused_and_statistics_reported():
    target = SLABSwin(**SMALL, norm_cfg=dict(type='RepBN'))
    state = random_state(target)
    key = norm_key(state)
    state[key.replace('weight', 'running_var')][0] = float('inf')
    report = load_pretrained(target, state)
    assert not report.complete and 'not finite' in str(report) and 'norm1.running_var: recalibrate' in str(report)
    state[key][1] = float('nan')
    with pytest.raises(CheckpointError, match=r'1 weights are NaN or infinite \(.*norm1\.weight\): take'):
        load_pretrained(target, state)


def test_surplus_and_missing_weights_are_reported():
    deep, shallow = SLABSwin(**{**SMALL, 'depths': (2, 4)}), SLABSwin(**SMALL)
    report = load_pretrained(shallow, random_state(deep))
    assert not report.complete and 'stages.1.blocks.2.' in str(report)
    assert all(re.match(r'stages\.1\.blocks\.[23]\.', key) for key in report.unused_unexpected)
    report = load_pretrained(deep, random_state(shallow))
    assert {key.split('.')[3] for key in report.missing_unexpected} == {'2', '3'}


def norm_key(state: dict) -> str:
    return next(key for key in state if key.endswith('norm1.weight'))


BAD = {
    'numbers': (lambda state: {'epoch': 3, 'lr': 0.1}, 'no weights.*epoch, lr'),
    'no dict': (lambda state: [1, 2], 'no weights.*list'),
    'zero matches': (lambda state: {'encoder.weight': torch.ones(2)}, 'nothing matches'),
    'one name in common': (
        lambda state: {norm_key(state): torch.ones(8), 'foo.bar': torch.ones(1)},
        'nothing matches',
    ),
    'wrong size': (
        lambda state: {**state, norm_key(state): torch.ones(11)},
        r'1 shapes do not fit.*norm1\.weight \(11,\).*\(8,\)',
    ),
}


@pytest.mark.parametrize('kind', BAD)
def test_bad_content_is_refused_in_one_line_and_nothing_is_loaded(tmp_path, kind):
    content, expected = BAD[kind]
    path = tmp_path / 'weights.pth'
    model = SLABPVT(
        embed_dims=8,
        num_layers=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 4),
        init_cfg=dict(type='Pretrained', checkpoint=str(path)),
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save(content(before), path)
    with pytest.raises(CheckpointError, match=expected) as error:
        load_pretrained(model, path)
    assert '\n' not in str(error.value) and 'weights.pth' in str(error.value)
    assert not differing(model, before)
    with pytest.raises(CheckpointError, match=expected):
        model.init_weights()


def test_tables_of_another_window_are_interpolated():
    small, large = (SLABSwin(**{**SMALL, 'window_size': size}, attention=('sla', 'softmax')) for size in (4, 6))
    nn.init.constant_(small.stages[0].blocks[0].attn.w_msa.positional_encoding, 0.5)
    # Rows and columns must not be mixed up.
    ramp = torch.arange(7.0)[:, None].expand(7, 7).reshape(49, 1)
    small.stages[1].blocks[0].attn.w_msa.relative_position_bias_table.data.copy_(ramp)
    report = load_pretrained(large, small.state_dict())
    assert report.complete and set(report.converted.values()) == {'position table interpolated'}, str(report)
    table = large.stages[0].blocks[0].attn.w_msa.positional_encoding
    torch.testing.assert_close(table, torch.full((1, 36, 8), 0.5))
    table = large.stages[1].blocks[0].attn.w_msa.relative_position_bias_table
    assert table.shape == (121, 2)
    rows = table[:, 0].view(11, 11)
    assert (rows.diff(dim=0) > 0).all()
    torch.testing.assert_close(rows, rows[:, :1].expand(11, 11))


@pytest.mark.parametrize('model', [SLABSwin, SwinTransformer, SLABPVT, PyramidVisionTransformer])
def test_a_fused_checkpoint_needs_a_fused_model(model):
    def unfused():
        small = SMALL if 'Swin' in model.__name__ else dict(num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
        backbone = model(**{**small, 'embed_dims': 8}, norm_cfg=dict(type='RepBN'))
        backbone.eval()  # mmdet's Swin returns None
        return backbone

    fused, normed = slab_det.fuse(unfused()), unfused().state_dict()
    with pytest.raises(CheckpointError, match='is fused: it has no norms'):
        load_pretrained(unfused(), fused.state_dict())
    with pytest.raises(CheckpointError, match='is not fused'):
        load_pretrained(fused, normed)
    assert load_pretrained(fused, fused.state_dict()).complete
