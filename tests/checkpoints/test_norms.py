"""Norms of a checkpoint are converted to the model's norms, or refused."""

import pytest
import torch
from conftest import as_trained, differing

from slab_det.backbones import SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.common.errors import CheckpointError

SMALL = dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)
QUADRATIC = ('UN', 'MABN', 'PowerNorm')


def build(norm, **options):
    return SLABSwin(norm_cfg=dict(type=norm, **options), **SMALL)


def trained(norm, **options):
    """A model whose every tensor differs from a fresh model's, and whose decay is finished."""
    model = as_trained(build(norm, **options))
    for name, value in model.state_dict().items():
        if name.endswith(('iteration', 'count', 'num_filtered')):
            value.fill_(7)
    return model


def copy_state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same_outputs(model, other):
    image = torch.rand(1, 3, 45, 61).double()
    with torch.no_grad():
        for ours, theirs in zip(model.double().eval()(image), other.double().eval()(image), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(('source', 'target'), [('TokenBN', 'RepBN'), ('TokenBN', 'PRepBN'), ('RepBN', 'PRepBN')])
def test_offline_norms_exchange_exactly(source, target):
    source, target = trained(source), build(target)
    report = load_pretrained(target, copy_state(source))
    assert report.complete, str(report)
    assert_same_outputs(target, source)
    assert target.norm0.statistics_loaded


@pytest.mark.parametrize(
    'source, target, options',
    [
        ('MABN', 'UN', {}),
        ('UN', 'PowerNorm', {}),
        ('UN', 'UN', dict(window_size=3)),
        ('MABN', 'MABN', dict(window_size=5)),
    ],
    ids=str,
)
def test_quadratic_norms_of_another_kind_or_window_load_inference_values(source, target, options):
    source, target = trained(source), build(target, **options)
    report = load_pretrained(target, copy_state(source))
    assert report.complete, str(report)
    assert 'averages of another training' in report.unused.values()
    assert set(report.missing.values()) <= {'averages of another training', 'computed from the window'}
    assert target.norm0.statistics_loaded
    assert_same_outputs(target, source)


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN', 'PRepBN', *QUADRATIC])
def test_an_untrained_checkpoint_holds_no_statistics(norm):
    target = build(norm)
    assert load_pretrained(target, copy_state(build(norm))).complete
    assert not target.norm0.statistics_loaded


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
        ('PRepBN', 'RepBN', r"dict\(type='PRepBN'\)"),
        *((source, 'UN', rf"dict\(type='{source}'\)") for source in ('TokenBN', 'RepBN', 'PRepBN')),
    ],
)
def test_norms_that_cannot_be_converted_are_refused_with_a_remedy(source, target, remedy):
    backbone = build(target)
    before = copy_state(backbone)
    holder = 'LayerNorm' if target == 'LN' else target
    message = rf'patch_embed\.norm: .*cannot become the {holder} of the model; set norm_cfg.*{remedy}'
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(backbone, copy_state(build(source)))
    assert not differing(backbone, before)


@pytest.mark.parametrize(
    ('source', 'target', 'lost'),
    [
        ('RepBN', 'RepBN', 'running_mean'),
        ('TokenBN', 'TokenBN', 'running_var'),
    ],
)
def test_norms_that_lack_a_statistic_are_refused(source, target, lost):
    state = {key: value for key, value in copy_state(trained(source)).items() if not key.endswith(lost)}
    with pytest.raises(CheckpointError, match='neither a complete .* nor a complete LayerNorm'):
        load_pretrained(build(target), state)


@pytest.mark.parametrize(('source', 'target'), [('UN', 'LN'), ('MABN', 'PRepBN'), ('PowerNorm', 'TokenBN')])
def test_quadratic_norms_do_not_become_other_norms(source, target):
    with pytest.raises(CheckpointError, match=f'complete {"LayerNorm" if target == "LN" else target}, as in the'):
        load_pretrained(build(target), copy_state(trained(source)))
