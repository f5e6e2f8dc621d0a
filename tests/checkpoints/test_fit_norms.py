"""Checkpoints with UN, MABN and PowerNorm: what may go where, and what of it."""

import pytest
import torch
from conftest import randomize
from torch import nn

from slab_det.backbones import SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.checkpoints.detector import check_detector_checkpoint
from slab_det.runtime.errors import CheckpointError

SMALL = dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)
QUADRATIC = ('UN', 'MABN', 'PowerNorm')
COMMON = {'weight', 'bias', 'running_var'}


def build(norm, **options):
    return SLABSwin(norm_cfg=dict(type=norm, **options), **SMALL)


def trained(norm, **options):
    """Every tensor of it is one that a fresh model has not."""
    model = build(norm, **options)
    randomize(model, 0)
    for name, value in model.state_dict().items():
        if name.endswith(('iteration', 'count', 'num_filtered')):
            value.fill_(7)
    return model.eval()


def copy_state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def norm_keys(state):
    return {key.removeprefix('norm0.') for key in state if key.startswith('norm0.')}


def outputs(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return model.double().eval()(torch.rand(1, 3, 45, 61, generator=generator).double())


@pytest.mark.parametrize('norm', QUADRATIC)
def test_a_training_starts_without_the_averages_of_another(norm):
    source, target = trained(norm), build(norm)
    fresh = copy_state(target)
    report = load_pretrained(target, {f'backbone.{key}': value for key, value in copy_state(source).items()})
    assert report.complete and not report.notes, str(report)
    for key in (f'norm0.{key}' for key in norm_keys(fresh) - COMMON):
        assert report.missing_expected[key] == report.unused_expected[f'backbone.{key}'] == 'state of another training'
    for key, value in target.norm0.state_dict().items():
        expected = source.norm0.state_dict()[key] if key in COMMON else fresh[f'norm0.{key}']
        assert torch.equal(value, expected), key
    assert target.norm0.statistics_loaded


@pytest.mark.parametrize('complete', [True, False])
@pytest.mark.parametrize('norm', QUADRATIC)
def test_a_detector_that_goes_on_gets_its_averages_back(norm, complete):
    """In a run that starts from a detector they are NormStateHook's to reset."""

    class Detector(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

    source, target = Detector(trained(norm)), Detector(build(norm))
    checkpoint = dict(state_dict=copy_state(source))
    report = check_detector_checkpoint(target, checkpoint, complete=complete)
    assert report.complete and not report.notes, str(report)
    target.load_state_dict(checkpoint['state_dict'])
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value), key
    assert target.backbone.norm0.statistics_loaded


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN', 'PRepBN', *QUADRATIC])
def test_a_checkpoint_from_before_training_holds_no_statistics(norm):
    target = build(norm)
    assert load_pretrained(target, copy_state(build(norm))).complete
    assert not target.norm0.statistics_loaded


@pytest.mark.parametrize(
    'source, target, options',
    [
        *((source, target, {}) for source in QUADRATIC for target in QUADRATIC if source != target),
        ('UN', 'UN', dict(window_size=3)),
        ('MABN', 'MABN', dict(window_size=5)),
    ],
    ids=str,
)
def test_another_of_them_takes_what_inference_needs_and_starts_its_averages(source, target, options):
    source, target = trained(source), build(target, **options)
    fresh = copy_state(target)
    report = load_pretrained(target, copy_state(source))
    assert report.complete, str(report)
    assert any('running_var of another norm or window (' in note for note in report.notes), str(report)
    assert norm_keys(report.unused_expected) == norm_keys(source.state_dict()) - COMMON
    assert norm_keys(report.missing_expected) == norm_keys(fresh) - COMMON
    for key in norm_keys(fresh):
        given = source.norm0.state_dict() if key in COMMON else fresh
        expected = given[key if key in COMMON else f'norm0.{key}']
        assert torch.equal(target.norm0.state_dict()[key], expected), key
    assert target.norm0.statistics_loaded
    for ours, theirs in zip(outputs(target), outputs(source), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_layout_of_the_released_norm_is_taken_too():
    """Buffers of the authors' code beside weight, bias and running_var."""
    state = copy_state(trained('PowerNorm'))
    for key in [key for key in state if key.endswith('.psi')]:
        prefix = key.removesuffix('psi')
        del state[key], state[f'{prefix}iteration']
        state.update({f'{prefix}ema_gz': torch.ones(8), f'{prefix}iters': torch.tensor([5])})
    report = load_pretrained(build('UN'), state)
    assert report.complete, str(report)
    assert {'norm0.ema_gz', 'norm0.iters'} <= report.unused_expected.keys()


@pytest.mark.parametrize('norm', QUADRATIC)
def test_layernorm_weights_are_a_start(norm):
    source, target = trained('LN'), build(norm)
    fresh = copy_state(target)
    report = load_pretrained(target, copy_state(source))
    assert report.complete, str(report)
    assert any(f'start {norm}' in note for note in report.notes), str(report)
    for key, value in target.norm0.state_dict().items():
        expected = source.norm0.state_dict()[key] if key in ('weight', 'bias') else fresh[f'norm0.{key}']
        assert torch.equal(value, expected), key
    assert not target.norm0.statistics_loaded


@pytest.mark.parametrize(
    'source, target, remedy',
    [
        *((source, 'LN', rf"norm_cfg.*dict\(type='{source}'\)") for source in ('PRepBN', 'RepBN', 'TokenBN')),
        ('RepBN', 'TokenBN', r"dict\(type='RepBN'\)"),
        *(
            (source, target, 'UN, MABN or PowerNorm it was trained with')
            for source in QUADRATIC
            for target in ('LN', 'TokenBN', 'RepBN', 'PRepBN')
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
    with pytest.raises(
        CheckpointError,
        match=rf'patch_embed\.norm: .*{target if target != "LN" else "LayerNorm"}.*'
        rf'cannot take it; set norm_cfg.*{remedy}',
    ):
        load_pretrained(backbone, copy_state(build(source)))
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
