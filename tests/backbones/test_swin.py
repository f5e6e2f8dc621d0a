"""SLABSwin: position embedding, activation checkpointing, frozen stages, initialisation."""

import pytest
import torch
from conftest import differing, randomize, relative_difference
from test_backbones import SWIN, build, twins

from slab_det.norms import PRepBN, set_gamma

PREPBN = dict(type='PRepBN')
SLAB = dict(attention=('sla', 'focused', 'softmax'), window_sizes=(6, 5, 4))


@torch.no_grad()
def test_position_embedding_equals_mmdet_at_its_own_size():
    ours, theirs = twins(SWIN, use_abs_pos_embed=True, pretrain_img_size=64)
    ours.eval(), theirs.eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.double)
    assert relative_difference(ours(x), theirs(x)) < 1e-9
    assert ours(torch.randn(1, 3, 50, 90, dtype=torch.double))[0].shape == (1, 8, 13, 23)


@pytest.mark.parametrize(('gamma', 'ffn_norm'), [(0.5, None), (1.0, None), (0.0, 'pre_act'), (0.5, 'post_act')])
def test_with_cp_changes_nothing(gamma, ffn_norm):
    # Dropout and drop-path included: the random state is replayed.
    options = dict(**SLAB, norm_cfg=PREPBN, drop_path_rate=0.3, drop_rate=0.1, ffn_norm=ffn_norm)
    plain = randomize(build(SWIN, **options).double())
    recomputed = build(SWIN, **options, with_cp=True).double()
    set_gamma(plain, gamma)
    recomputed.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 45, 70, dtype=torch.double)
    outputs = []
    for model in (plain, recomputed):
        model.train()
        torch.manual_seed(3)
        for _ in range(2):
            outputs.append(model(x))
            sum(out.pow(2).mean() for out in outputs[-1]).backward()
    for ours, theirs in zip(outputs[:2], outputs[2:], strict=True):
        assert relative_difference(ours, theirs) < 1e-9
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
    for (name, one), (_, other) in zip(plain.named_buffers(), recomputed.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_frozen_stages_stay_as_they_are():
    model = build(SWIN, norm_cfg=PREPBN, frozen_stages=2)
    set_gamma(model, 0.5)
    model.train()
    with pytest.MonkeyPatch.context() as patch:
        # mmengine calls train() in each iteration; to read a number there would wait for a GPU.
        patch.setattr('slab_det.norms.progressive.read_number', None)
        model.train()
    frozen = ('patch_embed.', 'stages.0.', 'stages.1.', 'norm0.', 'norm1.')
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sum(out.mean() for out in model(torch.randn(2, 3, 40, 40))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(frozen), name
    moved = differing(model, before)
    assert moved, 'statistics of the live stage'
    assert not [key for key in moved if key.startswith(frozen)]


def test_init_weights_starts_as_swin_does():
    model = build(SWIN, **SLAB, norm_cfg=PREPBN)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith('positional_encoding') or ('qkv' in name and name.endswith('bias')):
            assert not parameter.any(), name
        elif name.endswith(('qkv.weight', 'bias_table')):
            assert 0.01 < parameter.std() < 0.03, name
    assert all(norm.gamma == 1.0 for norm in model.modules() if isinstance(norm, PRepBN))
