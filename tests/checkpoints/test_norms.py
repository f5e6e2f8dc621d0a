"""Norms of a checkpoint and of a model: what may go where, and what of it."""

import pytest
import torch
from conftest import as_trained, differing

from slab_det.backbones import SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.runtime.errors import CheckpointError

SMALL = dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)
QUADRATIC = ('UN', 'MABN', 'PowerNorm')
COMMON = {'weight', 'bias', 'running_var'}


def build(norm, **options):
    return SLABSwin(norm_cfg=dict(type=norm, **options), **SMALL)


def trained(norm, **options):
    """Every tensor of it is one that a fresh model has not; a decay is finished."""
    model = as_trained(build(norm, **options))
    for name, value in model.state_dict().items():
        if name.endswith(('iteration', 'count', 'num_filtered')):
            value.fill_(7)
    return model


def copy_state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def norm_keys(state):
    return {key.removeprefix('norm0.') for key in state if key.startswith('norm0.')}


def assert_same_outputs(model, other):
    image = torch.rand(1, 3, 45, 61).double()
    with torch.no_grad():
        for ours, theirs in zip(model.double().eval()(image), other.double().eval()(image), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ('source', 'target'), [('TokenBN', 'RepBN'), ('TokenBN', 'PRepBN'), ('RepBN', 'PRepBN'), ('PRepBN', 'RepBN')]
)
def test_offline_norms_exchange_exactly(source, target):
    source, target = trained(source), build(target)
    report = load_pretrained(target, copy_state(source))
    assert report.complete, str(report)
    assert_same_outputs(target, source)
    assert target.norm0.statistics_loaded


@pytest.mark.parametrize(
    'source, target, options',
    [
        *((source, target, {}) for source in QUADRATIC for target in QUADRATIC if source != target),
        ('UN', 'UN', dict(window_size=3)),
        ('MABN', 'MABN', dict(window_size=5)),
    ],
    ids=str,
)
def test_other_quadratic_norms_give_what_inference_needs(source, target, options):
    source, target = trained(source), build(target, **options)
    fresh = copy_state(target)
    report = load_pretrained(target, copy_state(source))
    assert report.complete, str(report)
    assert norm_keys(report.unused) == norm_keys(source.state_dict()) - COMMON
    assert norm_keys(report.missing) == norm_keys(fresh) - COMMON
    assert set(report.missing.values()) <= {'averages of another training', 'computed from the window'}
    for key, value in target.norm0.state_dict().items():
        expected = source.norm0.state_dict()[key] if key in COMMON else fresh[f'norm0.{key}']
        assert torch.equal(value, expected), key
    assert target.norm0.statistics_loaded
    assert_same_outputs(target, source)


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN', 'PRepBN', *QUADRATIC])
def test_a_checkpoint_from_before_training_holds_no_statistics(norm):
    target = build(norm)
    assert load_pretrained(target, copy_state(build(norm))).complete
    assert not target.norm0.statistics_loaded


def test_the_layout_of_the_released_norm_is_taken_too():
    """Buffers of the authors' code beside weight, bias and running_var."""
    state = copy_state(trained('PowerNorm'))
    for key in [key for key in state if key.endswith('.psi')]:
        prefix = key.removesuffix('psi')
        del state[key], state[f'{prefix}iteration']
        state.update({f'{prefix}ema_gz': torch.ones(8), f'{prefix}iters': torch.tensor([5])})
    report = load_pretrained(build('UN'), state)
    assert report.complete, str(report)
    assert {'norm0.ema_gz', 'norm0.iters'} <= report.unused.keys()


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN', *QUADRATIC])
def test_layernorm_weights_are_a_start_and_the_report_says_so(norm):
    source = trained('LN')
    target = SLABSwin(norm_cfg=dict(type=norm), norm_eval=True, **SMALL)
    fresh = copy_state(target)
    report = load_pretrained(target, copy_state(source))
    assert report.complete and 'the checkpoint holds LayerNorm: train before fusing' in str(report), str(report)
    for key, value in target.norm0.state_dict().items():
        expected = source.norm0.state_dict()[key] if key in ('weight', 'bias') else fresh[f'norm0.{key}']
        assert torch.equal(value, expected), key
    assert not target.norm0.statistics_loaded
    assert target.train().norm0.training, 'statistics that were not loaded must stay live'


@pytest.mark.parametrize(
    'source, target, remedy',
    [
        *((source, 'LN', rf"norm_cfg.*dict\(type='{source}'\)") for source in ('PRepBN', 'RepBN', 'TokenBN')),
        ('RepBN', 'TokenBN', r"dict\(type='RepBN'\)"),
        *(
            (source, target, 'UN, MABN or PowerNorm it was trained with')
            for source in QUADRATIC
            for target in ('LN', 'TokenBN', 'PRepBN')
        ),
        *(
            (source, target, rf"dict\(type='{source}'\)")
            for source in ('TokenBN', 'RepBN', 'PRepBN')
            for target in QUADRATIC
        ),
    ],
)
def test_norms_that_cannot_hold_the_checkpoint_name_the_remedy(source, target, remedy):
    backbone = build(target)
    before = copy_state(backbone)
    holder = 'LayerNorm' if target == 'LN' else target
    with pytest.raises(
        CheckpointError, match=rf'patch_embed\.norm: .*{holder}.*cannot take it; set norm_cfg.*{remedy}'
    ):
        load_pretrained(backbone, copy_state(build(source)))
    assert not differing(backbone, before)


@pytest.mark.parametrize(
    ('source', 'target', 'lost'),
    [
        ('RepBN', 'PRepBN', 'running_var'),
        ('RepBN', 'RepBN', 'running_mean'),
        ('TokenBN', 'TokenBN', 'running_var'),
        ('PRepBN', 'PRepBN', 'running_mean'),
        ('PRepBN', 'RepBN', 'running_var'),
    ],
)
def test_own_norms_without_statistics_are_refused(source, target, lost):
    state = {key: value for key, value in copy_state(trained(source)).items() if not key.endswith(lost)}
    with pytest.raises(CheckpointError, match=r'norm: the checkpoint holds .* which make none of LayerNorm.*missing'):
        load_pretrained(build(target), state)
