"""Statistics without padding tokens, against formulas that see only the valid ones."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mmdet.registry import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint

import slab_det
from slab_det.norms import PRepBN, RepBN, TokenBN
from slab_det.norms.valid_tokens import ValidTokens
from slab_det.runtime.errors import SlabDetError

C = 5
SIZES, BATCH = [(64, 70), (33, 96)], (64, 96)
KINDS = [(TokenBN, 0.0), (RepBN, 0.0), (PRepBN, 0.0), (PRepBN, 0.5), (PRepBN, 1.0)]


def valid_by_hand(sizes, batch, stride):
    """Token by token, (B, L)."""
    rows, columns = (math.ceil(side / stride) for side in batch)
    return torch.tensor(
        [
            [stride * row < height and stride * column < width for row in range(rows) for column in range(columns)]
            for height, width in sizes
        ]
    )


@pytest.mark.parametrize(
    'sizes, batch',
    [(SIZES, BATCH), ([(64, 96), (64, 96)], BATCH), ([(1, 1)], (32, 32)), ([(30, 31), (20, 9)], (30, 31))],
    ids=str,
)
@pytest.mark.parametrize('stride', [4, 8, 16, 32])
def test_a_token_is_valid_if_it_begins_inside_its_image(sizes, batch, stride):
    expected = valid_by_hand(sizes, batch, stride)
    tokens = ValidTokens()
    tokens.set_batch(sizes, batch)
    split = tokens.split(torch.zeros(*expected.shape, C))
    assert (split is None) == bool(expected.all())
    if split is not None:
        assert split.valid.tolist() == expected.flatten().nonzero()[:, 0].tolist()
        assert split.padding.tolist() == (~expected).flatten().nonzero()[:, 0].tolist()


@pytest.mark.parametrize('stride', [4, 8, 16, 32])
@pytest.mark.parametrize(
    'rounding',
    [(math.floor, math.floor), (math.floor, math.ceil), (math.ceil, math.floor)],
    ids=lambda both: '-'.join(f.__name__ for f in both),
)
def test_maps_that_round_down_are_known_too(rounding, stride):
    """As strided convolutions without padding leave them, PVT's for one."""
    sizes, batch = [(250, 200), (161, 333), (5, 333)], (250, 333)
    rows, columns = (round_side(side / stride) for round_side, side in zip(rounding, batch, strict=True))
    expected = torch.tensor(
        [
            [stride * row < height and stride * column < width for row in range(rows) for column in range(columns)]
            for height, width in sizes
        ]
    )
    tokens = ValidTokens()
    tokens.set_batch(sizes, batch)
    split = tokens.split(torch.zeros(*expected.shape, C))
    assert split.valid.tolist() == expected.flatten().nonzero()[:, 0].tolist()


def test_tokens_that_could_be_two_maps_are_an_error_unless_both_say_the_same():
    tokens = ValidTokens()
    # 8 rows and 7 columns or 7 and 8, of 30x30 at stride 4.
    tokens.set_batch([(30, 30), (30, 4)], (30, 30))
    with pytest.raises(SlabDetError, match=r'could be several maps of 2 images padded to 30x30.*pad_size_divisor'):
        tokens.split(torch.zeros(2, 56, C))
    tokens.set_batch([(30, 30), (29, 30)], (30, 30))
    assert tokens.split(torch.zeros(2, 56, C)) is None, 'row 28 and column 28 are inside'


@pytest.mark.parametrize(
    'backbone',
    [
        dict(type='SLABPVT', embed_dims=8, num_heads=(1, 1, 2, 2), num_layers=(1, 1, 1, 1), sr_ratios=(8, 4, 2, 1)),
        dict(type='SLABSwin', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)),
        dict(
            type='PyramidVisionTransformerV2',
            embed_dims=8,
            num_heads=(1, 1, 2, 2),
            num_layers=(1, 1, 1, 1),
            sr_ratios=(8, 4, 2, 1),
        ),
    ],
    ids=lambda options: options['type'],
)
def test_backbones_need_no_multiples_of_32(backbone):
    """Whichever way they round, whole maps and those that attention strides over."""
    model = MODELS.build(dict(**backbone, norm_cfg=dict(type='PRepBN')))
    slab_det.set_gamma(model, 0.0)
    tokens = ValidTokens()
    seen = []
    for module in model.modules():
        if isinstance(module, TokenBN):
            module.valid_tokens = tokens
            module.register_forward_hook(lambda norm, args, y: seen.append((len(args[0][0]), tokens.split(args[0]))))
    sizes, batch = [(250, 101), (99, 333)], (250, 333)
    tokens.set_batch(sizes, batch)
    model.train()(torch.randn(2, 3, *batch))
    assert len(seen) >= 12
    for length, split in seen:
        # Both images cover about a third of the batch, in maps of any size but the smallest.
        if length > 1000:
            assert len(split.valid) / (2 * length) == pytest.approx((250 * 101 + 99 * 333) / (2 * 250 * 333), abs=0.03)


def test_norms_of_a_copied_model_share_the_copied_batches():
    model = nn.Sequential(TokenBN(C), TokenBN(C))
    model[0].valid_tokens = model[1].valid_tokens = ValidTokens()
    model[0].valid_tokens.set_batch(SIZES, BATCH)
    x = torch.zeros(2, 384, C)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        tokens = twin[0].valid_tokens
        assert tokens is twin[1].valid_tokens and tokens is not model[0].valid_tokens
        assert torch.equal(tokens.split(x).valid, model[0].valid_tokens.split(x).valid)
        tokens.set_batch([BATCH, BATCH], BATCH)
        assert twin[1].split_padding(x) is None and model[1].split_padding(x) is not None


ORDERS = {'one backward': [[0, 1, 2, 3]], 'first first': [[0], [1], [2], [3]], 'last first': [[3], [2], [1], [0]]}
RUNS = {
    'not reentrant': lambda part, x: checkpoint(part, x, use_reentrant=False),
    'reentrant': lambda part, x: checkpoint(part, x, use_reentrant=True),
    'nested': lambda part, x: checkpoint(lambda z: checkpoint(part, z, use_reentrant=False), x, use_reentrant=False),
}


def gradients_of_batches(kind, gamma, run, backwards, interleaved=False):
    """Of several batches of one shape, each with other padding, that wait for their backward passes."""
    norms = nn.ModuleList([make_norm(kind, gamma), make_norm(kind, gamma)])
    inner = [norm.repbn if kind is PRepBN else norm for norm in norms]
    tokens = inner[1].valid_tokens = inner[0].valid_tokens
    generator = torch.Generator().manual_seed(7)
    leaves, losses = [], []
    for sizes in (SIZES, [BATCH, (17, 20)], [BATCH, BATCH], [(64, 96), (1, 1)]):
        tokens.set_batch(sizes, BATCH)
        leaves.append(torch.randn(2, 384, C, generator=generator, dtype=torch.double).requires_grad_())
        # Each norm in a checkpoint of its own, as blocks of a backbone.
        losses.append(run(norms[1], run(norms[0], leaves[-1]).sin()).cos().sum())
        if interleaved and len(losses) > 1:
            losses[-2].backward()
    for group in [[3]] if interleaved else backwards:
        sum(losses[i] for i in group).backward()
    return [*(leaf.grad for leaf in leaves), *(parameter.grad for parameter in norms.parameters())]


@pytest.mark.parametrize('run', RUNS)
@pytest.mark.parametrize('order', [*ORDERS, 'interleaved'])
@pytest.mark.parametrize('kind, gamma', [(TokenBN, 0.0), (PRepBN, 0.5)])
def test_recomputed_forwards_exclude_the_padding_of_their_own_batch(kind, gamma, order, run):
    options = ORDERS.get(order), order == 'interleaved'
    plain = gradients_of_batches(kind, gamma, lambda part, x: part(x), *options)
    assert all(map(torch.equal, plain, gradients_of_batches(kind, gamma, RUNS[run], *options)))


@pytest.mark.parametrize('inner', [True, False], ids=['reentrant', 'not reentrant'])
def test_a_checkpoint_within_a_reentrant_one_is_refused(inner):
    def twice(part, x):
        return checkpoint(lambda z: checkpoint(part, z, use_reentrant=inner), x, use_reentrant=True)

    with pytest.raises(SlabDetError, match='within a reentrant one'):
        gradients_of_batches(TokenBN, 0.0, twice, ORDERS['first first'])


def test_a_forward_of_long_ago_is_not_recomputed_with_the_padding_of_another(monkeypatch):
    monkeypatch.setattr(ValidTokens, 'MAX_PENDING', 2)
    with pytest.raises(SlabDetError, match='2 batches after'):
        gradients_of_batches(TokenBN, 0.0, RUNS['not reentrant'], ORDERS['first first'])


def test_without_a_batch_every_token_is_valid():
    assert ValidTokens().split(torch.zeros(2, 7, C)) is None


@pytest.mark.parametrize('shape', [(3, 384), (2, 100), (384,), (2, 4, 96)], ids=str)
def test_tokens_that_are_no_map_of_the_batch_are_an_error(shape):
    tokens = ValidTokens()
    tokens.set_batch(SIZES, BATCH)
    with pytest.raises(SlabDetError, match=r'64x96.*pad_size_divisor'):
        tokens.split(torch.zeros(*shape, C))


def make_norm(kind, gamma):
    norm = kind(C).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    slab_det.set_gamma(norm, gamma)
    tokens = ValidTokens()
    tokens.set_batch(SIZES, BATCH)
    (norm.repbn if kind is PRepBN else norm).valid_tokens = tokens
    return norm


def formula(norm, gamma, x, valid):
    """Every token by mean and variance of the valid ones; LayerNorm token by token."""
    bn = norm.repbn if isinstance(norm, PRepBN) else norm
    mean, var = x[valid].mean(0), x[valid].var(0, correction=0)
    y = (x - mean) / (var + 1e-5).sqrt() * bn.weight + bn.bias
    if isinstance(bn, RepBN):
        y = y + bn.eta * x
    if gamma:
        ln = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        y = gamma * (ln * norm.ln.weight + norm.ln.bias) + (1 - gamma) * y
    return y


@pytest.mark.parametrize('kind, gamma', KINDS)
def test_training_normalises_by_the_valid_tokens(kind, gamma):
    norm = make_norm(kind, gamma)
    valid = valid_by_hand(SIZES, BATCH, 4)
    x = torch.randn(*valid.shape, C, dtype=torch.double)
    # What a norm that saw it could not hide.
    x = torch.where(valid[..., None], x, x * 3 + 20)
    dy = torch.randn_like(x)
    parameters = [p for name, p in norm.named_parameters() if gamma > 0 or not name.startswith('ln.')]
    results = []
    for forward in (norm, lambda tokens: formula(norm, gamma, tokens, valid)):
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        grads = torch.autograd.grad(y, [leaf, *parameters], dy, allow_unused=True)
        results.append([y, *grads])
    for got, wanted in zip(*results, strict=True):
        wanted = torch.zeros_like(got) if wanted is None else wanted
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-9)
    mean, var = norm.statistics()
    torch.testing.assert_close(mean, 0.1 * x[valid].mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(var, 0.9 + 0.1 * x[valid].var(0), rtol=1e-10, atol=0)


@pytest.mark.parametrize('kind, gamma', KINDS)
def test_recomputation_and_half_precision_exclude_padding_too(kind, gamma):
    valid = valid_by_hand(SIZES, BATCH, 8)
    x = torch.where(valid[..., None], torch.randn(*valid.shape, C), 50.0)
    plain, recomputed, half = (make_norm(kind, gamma).float() for _ in range(3))
    grads = []
    for run in (plain, lambda tokens: checkpoint(recomputed, tokens, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        run(leaf).sin().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert all(map(torch.equal, plain.statistics(), recomputed.statistics()))
    with torch.autocast('cpu', torch.bfloat16):
        half(x.bfloat16())
    for got, wanted in zip(half.statistics(), plain.statistics(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize('kind, gamma', KINDS)
def test_evaluation_and_calibration_see_every_token(kind, gamma):
    norm, plain = make_norm(kind, gamma), make_norm(kind, gamma)
    (plain.repbn if kind is PRepBN else plain).valid_tokens = None
    x = torch.randn(2, 384, C, dtype=torch.double)
    for norm.training, norm.calibrating in ((False, False), (False, True), (True, True)):
        plain.training, plain.calibrating = norm.training, norm.calibrating
        for part in (norm, plain):
            if kind is PRepBN:
                part.repbn.training = norm.training
        assert torch.equal(norm(x), plain(x))
    norm.calibrating = plain.calibrating = False
    norm.train()(x)
    plain.train()(x)
    assert not any(map(torch.equal, norm.statistics(), plain.statistics())), 'training does not'


@pytest.mark.parametrize('kind, gamma', KINDS)
def test_a_batch_without_padding_takes_the_usual_way(kind, gamma):
    norm, plain = make_norm(kind, gamma), make_norm(kind, gamma)
    inner, other = (n.repbn if kind is PRepBN else n for n in (norm, plain))
    other.valid_tokens = None
    inner.valid_tokens.set_batch([BATCH, BATCH], BATCH)
    x = torch.randn(2, 384, C, dtype=torch.double)
    assert torch.equal(norm(x), plain(x))
    assert all(map(torch.equal, norm.statistics(), plain.statistics()))


def tokens_on_rank(rank):
    """Tokens, upstream gradient and validity; the second process has an image without padding, and one half empty."""
    sizes = SIZES if rank == 0 else [BATCH, (32, 40)]
    valid = valid_by_hand(sizes, BATCH, 8)
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(*valid.shape, C, generator=generator, dtype=torch.double) for _ in range(2))
    return sizes, valid, torch.where(valid[..., None], x, 3 * x + 20), dy


def _train_on_rank(rank, world_size, folder):
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    sizes, _, x, dy = tokens_on_rank(rank)
    results = []
    for kind, gamma in KINDS:
        norm = make_norm(kind, gamma)
        inner = norm.repbn if kind is PRepBN else norm
        inner.sync = True
        inner.valid_tokens.set_batch(sizes, BATCH)
        x = x.detach().requires_grad_()
        y = norm(x)
        results.append([y.detach(), *torch.autograd.grad(y, x, dy), *norm.statistics()])
    torch.save(results, f'{folder}/{rank}.pt')
    dist.destroy_process_group()


def test_synchronised_processes_pool_their_valid_tokens(tmp_path):
    mp.spawn(_train_on_rank, (2, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f'{rank}.pt') for rank in range(2)]
    valid, x, dy = (torch.cat(parts) for parts in list(zip(*map(tokens_on_rank, range(2)), strict=True))[1:])
    for i, (kind, gamma) in enumerate(KINDS):
        leaf = x.clone().requires_grad_()
        y = formula(make_norm(kind, gamma), gamma, leaf, valid)
        wanted = y.detach(), *torch.autograd.grad(y, leaf, dy)
        for part, value in enumerate(wanted):
            got = torch.cat([rank[i][part] for rank in ranks])
            torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-9, msg=f'{kind} {gamma} {part}')
        for rank in ranks:
            torch.testing.assert_close(rank[i][2], 0.1 * x[valid].mean(0), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(rank[i][3], 0.9 + 0.1 * x[valid].var(0), rtol=1e-9, atol=0)
