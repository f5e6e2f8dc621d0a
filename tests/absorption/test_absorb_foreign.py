"""absorb: foreign models with registered rules for the readers of norms and the writers of the stream."""

import copy
import os

import pytest
import torch
from conftest import HalfWindowMSA, layer_norms, pictures
from mmdet.models.backbones.swin import SwinTransformer
from teachers import NORMS_GONE
from torch import nn

from slab_det.absorption.absorption import absorb
from slab_det.conversion import ConversionError
from slab_det.fusion import Fold, Write, register_folds
from slab_det.fusion.folding import apply_folds


class Plain(nn.Module):
    """A foreign pre-norm model with a norm that two layers read."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.gate = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.run_ffn(self.stem(x.flatten(2).transpose(1, 2)))

    def run_ffn(self, x):
        y = self.norm(x)
        return x + self.down(self.up(y).relu() * self.gate(y).sigmoid())


register_folds(Plain, folds=lambda m: [Fold('norm', ('up', 'gate'))], writes=lambda m: [Write('down')])


class Twice(Plain):
    def forward(self, x):
        return super().forward(x) + self.norm(self.stem(x.flatten(2).transpose(1, 2)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Plain(), Plain()

    def forward(self, x):
        return self.first(x) + self.second(x)


@pytest.mark.parametrize(
    ('norms', 'kept'), [('first.norm', ['first.norm']), (('first.norm',), ['first.norm']), ([], [])]
)
def test_norms_takes_one_name_or_several(norms, kept):
    assert layer_norms(absorb(Pair().eval(), pictures(), 1, norms, progress=False)) == kept


def test_names_that_leave_nothing_to_absorb_are_an_error():
    with pytest.raises(ConversionError, match='no LayerNorm that can be absorbed: kept by choice; .* fewer names'):
        absorb(Pair().eval(), pictures(), 1, ['first.norm', 'second.norm'], progress=False)


@pytest.mark.parametrize('norms', [True, None, 0, 1.0, [1], ['norm', 1]])
def test_invalid_norms_are_an_error(norms):
    with pytest.raises(ConversionError, match="^norms=.*: give 'keep', 'remove' or names"):
        absorb(Plain().eval(), pictures(), 1, norms, progress=False)


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def cut_off(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', cut_off)
        with pytest.raises(KeyboardInterrupt):
            absorb(Plain().eval(), pictures(), work_dir=tmp_path, **NORMS_GONE)
    assert not [*tmp_path.iterdir()]


def test_a_work_dir_accepts_models_with_integer_buffers(tmp_path):
    model = nn.Sequential(nn.BatchNorm2d(3), Plain()).eval()
    assert not layer_norms(absorb(model, pictures(), work_dir=tmp_path, **NORMS_GONE))


def test_apply_folds_creates_tensors_on_the_device_of_the_model():
    """The meta device, like a GPU, refuses operations with CPU tensors."""
    student = absorb(Plain().eval(), pictures(), **NORMS_GONE)
    apply_folds(Plain().eval().to('meta'), student.fusion_report.norms)


def test_any_model_with_registered_folds_is_absorbed():
    register_folds(Twice, folds=lambda m: [Fold('norm', ('up', 'gate'))])
    model = Plain().eval()
    student = absorb(model, pictures(10), **NORMS_GONE)
    assert student.fusion_report.norms[0].into == ('up', 'gate')
    assert isinstance(student.norm, nn.Identity) and [*student.absorption_report.refits] == ['down']
    with pytest.raises(ConversionError, match='a forward calls it 2 times'):
        absorb(Twice().eval(), pictures(10), **NORMS_GONE)


@pytest.mark.parametrize('bias', [True, False])
def test_the_reported_error_of_a_writer_is_its_error_on_held_out_images(bias):
    """The oracle computes the squared distances on the held-out images; the writer may have no bias."""
    torch.manual_seed(0)
    model = Plain().eval().double()
    model.down = nn.Linear(16, 8, bias=bias).double()
    images = [image.double() for image in pictures(10, (30, 34))]
    student = absorb(model, images, **NORMS_GONE)
    not_fitted = copy.deepcopy(student)
    not_fitted.down = model.down
    with torch.no_grad():
        nets = model, student, not_fitted
        expected, one, other = (torch.cat([m(image) for image in images[4::5]]) for m in nets)
    left = (one - expected).square().sum() / (other - expected).square().sum()
    assert student.absorption_report.refits == dict(down=pytest.approx(float(left))) and left < 1


class Forked(Plain):
    """A block with a further layer, which is fitted to its own output."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(8, 8)

    def forward(self, x):
        y = super().forward(x)
        return y + self.side(y)


def test_a_layer_with_a_stream_of_its_own_is_fitted_with_its_block():
    register_folds(Forked, folds=lambda m: [Fold('norm', ('up', 'gate'))], writes=lambda m: [Write('side', 'side')])
    model = nn.Sequential(nn.Identity(), Forked()).eval()
    report = absorb(model, pictures(10), **NORMS_GONE).absorption_report
    assert [*report.refits] == ['1.side'] and report.refits['1.side'] < 1


class Pooled(Plain):
    def forward(self, x):
        return self.up(self.norm(self.stem(x.mean((2, 3)))))


def test_a_norm_of_one_token_per_image_is_absorbed():
    register_folds(Pooled, folds=lambda m: [Fold('norm', 'up')])
    (norm,) = absorb(Pooled().eval(), pictures(10), **NORMS_GONE).absorption_report.norms
    assert norm.outcome == 'absorbed' and 0 <= norm.error < 1


class Recurrent(Plain):
    """The norm runs once, the block behind it twice."""

    def __init__(self):
        super().__init__()
        self.block = Plain()
        self.block.stem = nn.Identity()

    def forward(self, x):
        x = self.up(self.norm(self.stem(x.flatten(2).transpose(1, 2))))[..., :8]
        for _ in range(2):
            x = self.block(x.transpose(1, 2)[..., None])
        return x


def test_a_block_that_runs_twice_is_not_changed():
    register_folds(Recurrent, folds=lambda m: [Fold('norm', 'up')])
    model = Recurrent().eval()
    student = absorb(model, pictures(10), **NORMS_GONE)
    assert layer_norms(student) == ['block.norm'] and not student.absorption_report.refits
    for one, other in zip(model.block.parameters(), student.block.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_unknown_subclass_of_mmdets_attention_is_an_error():
    model = SwinTransformer(embed_dims=8, depths=(1, 1), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1))
    model.eval()
    model.stages[0].blocks[0].attn.w_msa.__class__ = HalfWindowMSA
    with pytest.raises(ConversionError, match=r'stages\.0\.blocks\.0\.attn: its attention is a HalfWindowMSA'):
        absorb(model, pictures(), **NORMS_GONE)
