"""The PVT authors' and the SLAB authors' layouts of PVT, against forwards written from their key names."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2
from torch import Tensor, nn

from slab_det.backbones import SLABPVT
from slab_det.checkpoints import LoadReport, load_pretrained
from slab_det.runtime.errors import CheckpointError

DIMS, DEPTHS, HEADS, RATIOS, REDUCTIONS = (8, 16, 16, 32), (1, 2, 1, 1), (1, 2, 2, 4), (8, 8, 4, 4), (8, 4, 2, 1)
SMALL = dict(embed_dims=8, num_layers=DEPTHS, num_heads=HEADS, pretrain_img_size=64)
V2 = dict(
    patch_sizes=(7, 3, 3, 3), paddings=(3, 1, 1, 1), use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True
)
PREPBN = dict(type='PRepBN', ln_eps=1e-6)

with gzip.open(Path(__file__).parents[1] / 'data' / 'checkpoint_manifests.json.gz') as file:
    MANIFESTS = json.load(file)


def official_shapes(version: int = 1, img_size: int = 64, linear: bool = False) -> dict:
    """Shapes of a small PVT in the authors' names; ``linear``: of SLAB's, but for its norms."""
    shapes = {}

    def affine(name: str, *shape: int) -> None:
        shapes[f'{name}.weight'], shapes[f'{name}.bias'] = shape, shape[:1]

    previous = 3
    for i, (dim, depth, heads, ratio, r) in enumerate(zip(DIMS, DEPTHS, HEADS, RATIOS, REDUCTIONS, strict=True), 1):
        kernel = (4 if i == 1 else 2) if version == 1 else (7 if i == 1 else 3)
        affine(f'patch_embed{i}.proj', dim, previous, kernel, kernel)
        affine(f'patch_embed{i}.norm', dim)
        positions = (img_size // 2 ** (i + 1)) ** 2
        if version == 1:
            shapes[f'pos_embed{i}'] = (1, positions + (i == 4 and not linear), dim)
        for j in range(depth):
            block = f'block{i}.{j}'
            for name, shape in (
                ('norm1', (dim,)),
                ('attn.q', (dim, dim)),
                ('attn.kv', (2 * dim, dim)),
                ('attn.proj', (dim, dim)),
                ('norm2', (dim,)),
                ('mlp.fc1', (ratio * dim, dim)),
                ('mlp.fc2', (dim, ratio * dim)),
            ):
                affine(f'{block}.{name}', *shape)
            if linear:
                shapes[f'{block}.attn.positional_encoding'] = (1, positions, dim)
                affine(f'{block}.attn.dwc', dim // heads, 1, 5, 5)
            elif r > 1:
                affine(f'{block}.attn.sr', dim, dim, r, r)
                affine(f'{block}.attn.norm', dim)
            if version == 2:
                affine(f'{block}.mlp.dwconv.dwconv', ratio * dim, 1, 3, 3)
        if version == 2:
            affine(f'norm{i}', dim)
        previous = dim
    if version == 1 and not linear:
        shapes['cls_token'] = (1, 1, previous)
        affine('norm', previous)
    affine('head', 10, previous)
    return shapes


def random_state(shapes: dict, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64)
        / math.sqrt(math.prod(shape[1:]) if len(shape) in (2, 4) else 2)
        + ('norm' in key)
        for key, shape in shapes.items()
    }


def layer_norm(state: dict, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt()
    return unit * state[f'{name}.weight'] + state[f'{name}.bias']


def official_norm(state: dict, name: str, x: Tensor) -> Tensor:
    """PVT's LayerNorms: eps is 1e-6 but for two places that take PyTorch's default."""
    return layer_norm(state, name, x, 1e-5 if 'patch_embed' in name or 'attn.norm' in name else 1e-6)


def slab_norm(state: dict, name: str, x: Tensor) -> Tensor:
    """gamma LN + (1 - gamma) (BN + eta x), gamma from the counters; plain RepBN without them."""
    gamma = 0.0
    bn, eta = f'{name}.bn', state.get(f'{name}.alpha')
    if f'{name}.total_step' in state:
        gamma = (state[f'{name}.iter'] / state[f'{name}.total_step']).item()
        bn, eta = f'{name}.norm2.bn', state[f'{name}.norm2.alpha']
    normed = (x - state[f'{bn}.running_mean']) / (state[f'{bn}.running_var'] + 1e-5).sqrt()
    out = normed * state[f'{bn}.weight'] + state[f'{bn}.bias'] + eta * x
    return gamma * layer_norm(state, f'{name}.norm1', x, 1e-6) + (1 - gamma) * out if gamma else out


def linear(state: dict, name: str, x: Tensor) -> Tensor:
    return x @ state[f'{name}.weight'].T + state[f'{name}.bias']


def conv(state: dict, name: str, image: Tensor, stride: int, **options) -> Tensor:
    return F.conv2d(image, state[f'{name}.weight'], state[f'{name}.bias'], stride, **options)


def to_image(x: Tensor, h: int, w: int) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], -1, h, w)


def to_tokens(image: Tensor) -> Tensor:
    return image.flatten(2).transpose(1, 2)


def official_attention(state: dict, name: str, x: Tensor, h: int, w: int, heads: int, norm) -> Tensor:
    """Softmax with spatial reduction, or linear where the state holds a table P; head by head."""
    source = x
    if f'{name}.sr.weight' in state:
        source = norm(
            state,
            f'{name}.norm',
            to_tokens(conv(state, f'{name}.sr', to_image(x, h, w), state[f'{name}.sr.weight'].shape[-1])),
        )
    q, (k, v) = linear(state, f'{name}.q', x), linear(state, f'{name}.kv', source).chunk(2, -1)
    is_linear = f'{name}.positional_encoding' in state
    if is_linear:
        q, k = q.relu(), (k + state[f'{name}.positional_encoding']).relu()
    mixed = []
    for q_h, k_h, v_h in zip(*(t.chunk(heads, -1) for t in (q, k, v)), strict=True):
        products = q_h @ k_h.transpose(1, 2)
        if is_linear:
            local = to_tokens(conv(state, f'{name}.dwc', to_image(v_h, h, w), 1, padding=2, groups=v_h.shape[-1]))
            mixed.append(products / (products.sum(-1, keepdim=True) + 1e-6) @ v_h + local)
        else:
            mixed.append((products / math.sqrt(q_h.shape[-1])).softmax(-1) @ v_h)
    return linear(state, f'{name}.proj', torch.cat(mixed, -1))


def official_features(state: dict, image: Tensor, norm=official_norm) -> list[Tensor]:
    """One map per stage, as the authors' detectors compute it."""
    outs = []
    for i, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True), 1):
        kernel = state[f'patch_embed{i}.proj.weight'].shape[-1]
        overlapping = kernel % 2 == 1
        image = conv(state, f'patch_embed{i}.proj', image, 4 if i == 1 else 2, padding=kernel // 2 * overlapping)
        h, w = image.shape[2:]
        x = norm(state, f'patch_embed{i}.norm', to_tokens(image))
        if f'pos_embed{i}' in state:
            table = state[f'pos_embed{i}']
            side = math.isqrt(table.shape[1])
            table = to_image(table[:, -side * side :], side, side)
            x = x + to_tokens(F.interpolate(table, (h, w), mode='bilinear'))
        for j in range(depth):
            block = f'block{i}.{j}'
            x = x + official_attention(state, f'{block}.attn', norm(state, f'{block}.norm1', x), h, w, heads, norm)
            hidden = linear(state, f'{block}.mlp.fc1', norm(state, f'{block}.norm2', x))
            if f'{block}.mlp.dwconv.dwconv.weight' in state:
                hidden = to_tokens(
                    conv(
                        state,
                        f'{block}.mlp.dwconv.dwconv',
                        to_image(hidden, h, w),
                        1,
                        padding=1,
                        groups=hidden.shape[-1],
                    )
                )
            x = x + linear(state, f'{block}.mlp.fc2', F.gelu(hidden))
        if f'norm{i}.weight' in state:
            x = norm(state, f'norm{i}', x)
        image = to_image(x, h, w)
        outs.append(image)
    return outs


def with_official_eps(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith(('.0.norm', '.attn.norm')):
            module.eps = 1e-5
    return model


def build(kind: str, version: int = 1, **options) -> nn.Module:
    """A small PVT of ours or mmdet's."""
    options = {**SMALL, **options}
    if kind == 'ours':
        return SLABPVT(**options, **(V2 if version == 2 else {})).double().eval()
    return (PyramidVisionTransformer if version == 1 else PyramidVisionTransformerV2)(**options).double().eval()


@torch.no_grad()
def assert_same_features(model: nn.Module, expected: list[Tensor], image: Tensor) -> None:
    for i, (got, want) in enumerate(zip(model(image), expected, strict=True)):
        distance = ((got - want).abs().max() / want.abs().max()).item()
        assert distance < 1e-10, f'stage {i}: {distance:.1e}'


@pytest.mark.parametrize('kind', ['ours', 'mmdet'])
@pytest.mark.parametrize('version', [1, 2])
@pytest.mark.parametrize(('img_size', 'input_size'), [(64, (64, 64)), (64, (75, 109)), (224, (224, 224))])
def test_features_equal_the_official_forward(kind, version, img_size, input_size):
    state = random_state(official_shapes(version, img_size))
    model = build(kind, version, pretrain_img_size=img_size)
    report = load_pretrained(model, state)
    assert report.complete, str(report)
    assert report.format == 'official_pvt'
    assert set(report.matched) | set(report.missing_expected) == set(model.state_dict()), str(report)
    image = torch.randn(2, 3, *input_size, dtype=torch.float64)
    assert_same_features(with_official_eps(model), official_features(state, image), image)


@pytest.mark.parametrize('version', [1, 2])
def test_report_says_what_was_converted_and_of_the_other_eps(version):
    report = load_pretrained(build('ours', version), random_state(official_shapes(version)))
    text = str(report)
    blocks = sum(DEPTHS)
    assert f'linear to 1x1 convolution ({2 * blocks})' in text
    assert f'q and kv packed ({2 * blocks})' in text
    assert ("class token's position dropped (1)" in text) == (version == 1)
    assert 'class token (1)' in text or version == 2
    assert '8 norms' in text and 'eps 1e-06' in text, '4 patch embeddings and 4 reductions'
    report = load_pretrained(with_official_eps(build('ours', version)), random_state(official_shapes(version)))
    assert not report.notes


def slab_state(remaining: int | None) -> dict:
    """A small SLAB-PVT; ``remaining`` of 40 steps to go, None for plain RepBN without counters."""
    plain = random_state(official_shapes(linear=True))
    state = {}
    for key, value in plain.items():
        name, _, part = key.rpartition('.')
        if not name.endswith(('norm', 'norm1', 'norm2')):
            state[key] = value
            continue
        prefix = name if remaining is None else f'{name}.norm2'
        state[f'{prefix}.bn.{part}'] = value
        if part == 'weight':
            noise = random_state({'mean': value.shape, 'var': value.shape}, seed=len(state))
            state[f'{prefix}.bn.running_mean'], state[f'{prefix}.bn.running_var'] = noise['mean'], noise['var'].exp()
            state[f'{prefix}.bn.num_batches_tracked'] = torch.tensor(7)
            state[f'{prefix}.alpha'] = torch.full((1,), 0.75, dtype=torch.float64)
        if remaining is not None:
            state[f'{name}.norm1.{part}'] = value.flip(0)
            state.update(
                {
                    f'{name}.{counter}': torch.tensor(count)
                    for counter, count in (('warm', 0), ('iter', remaining), ('total_step', 40))
                }
            )
    return state


@pytest.mark.parametrize('remaining', [0, 10, 40, None])
def test_slab_pvt_equals_the_official_forward(remaining):
    state = slab_state(remaining)
    model = build('ours', norm_cfg=PREPBN, attention='sla')
    report = load_pretrained(model, {'model': state})
    assert report.complete and report.format == 'slab_official', str(report)
    gamma = (remaining or 0) / 40
    assert set(report.gammas.values()) == {gamma}, str(report)
    assert f'{gamma:g} in {4 + 2 * sum(DEPTHS)} norms' in str(report)
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert_same_features(model, official_features(state, image, slab_norm), image)


@pytest.mark.parametrize('lost', [(), ('cls_token',)])
def test_class_position_is_dropped_with_and_without_the_token(lost):
    # Official detectors keep the position of a token that they do not have.
    state = random_state(official_shapes())
    model = build('ours')
    load_pretrained(model, {key: value for key, value in state.items() if key not in lost})
    assert torch.equal(model.state_dict()['layers.3.1.0.pos_embed'], state['pos_embed4'][:, 1:])


def pvt_of_size(height: int, width: int, has_row: bool) -> dict:
    state = {key: value for key, value in random_state(official_shapes()).items() if key != 'cls_token'}
    for stage in range(4):
        length = (height // 2 ** (stage + 2)) * (width // 2 ** (stage + 2)) + (has_row and stage == 3)
        state[f'pos_embed{stage + 1}'] = torch.randn(1, length, DIMS[stage], dtype=torch.float64)
    return state


@pytest.mark.parametrize('has_row', [False, True])
@pytest.mark.parametrize('size', [(64, 160), (96, 96), (160, 32)])
def test_maps_that_are_no_square_keep_their_first_position(size, has_row):
    # A map of 2x5 has one position more than one of 3x3.
    state = pvt_of_size(*size, has_row)
    model = build('ours', pretrain_img_size=size)
    assert load_pretrained(model, state).complete
    assert torch.equal(model.state_dict()['layers.3.1.0.pos_embed'], state['pos_embed4'][:, int(has_row) :])


def test_tables_of_another_image_size_become_what_the_forward_makes_of_them():
    state = random_state(official_shapes(img_size=64))
    same, other = build('ours'), build('ours', pretrain_img_size=(96, 160))
    load_pretrained(same, state)
    report = load_pretrained(other, state)
    assert report.complete, str(report)
    changes = {key: change for key, change in report.converted.items() if key.endswith('pos_embed')}
    assert len(changes) == 4 and all('position table interpolated' in change for change in changes.values())
    image = torch.randn(1, 3, 96, 160, dtype=torch.float64)
    assert_same_features(other, same(image), image)
    for stage, (height, width) in enumerate([(24, 40), (12, 20), (6, 10), (3, 5)]):
        # Rows of a table that says where it is: the new rows must be the old ones' neighbours, in order.
        side = 16 // 2**stage
        ramp = torch.arange(float(side), dtype=torch.float64)[:, None].expand(side, side).reshape(1, -1, 1)
        state[f'pos_embed{stage + 1}'] = (
            torch.cat([ramp[:, :1]] * (stage == 3) + [ramp], 1).expand(-1, -1, DIMS[stage]).clone()
        )
        load_pretrained(other, state)
        got = other.state_dict()[f'layers.{stage}.1.0.pos_embed'].view(height, width, -1)
        rows = ((torch.arange(height, dtype=torch.float64) + 0.5) * side / height - 0.5).clamp(0, side - 1)
        torch.testing.assert_close(got, rows[:, None, None].expand_as(got))


def test_linear_tables_follow_the_image_size():
    state = slab_state(0)
    model = build('ours', norm_cfg=PREPBN, attention='sla', pretrain_img_size=(96, 64))
    report = load_pretrained(model, state)
    assert sum('interpolated' in change for change in report.converted.values()) == 4 + sum(DEPTHS)
    same = build('ours', norm_cfg=PREPBN, attention='sla')
    load_pretrained(same, state)
    image = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    assert_same_features(model, same(image), image)


@pytest.mark.parametrize(
    ('source', 'target', 'option'),
    [(1, 2, 'use_abs_pos_embed=True, use_conv_ffn=False'), (2, 1, 'use_abs_pos_embed=False, use_conv_ffn=True')],
)
@pytest.mark.parametrize('kind', ['official', 'native'])
def test_the_other_version_of_pvt_is_refused(kind, source, target, option):
    # Block 1 of V2 has the keys of block 0 of V1.
    state = random_state(official_shapes(source)) if kind == 'official' else build('ours', source).state_dict()
    model = build('ours', target)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=option):
        load_pretrained(model, state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ('shape', 'named'),
    [
        ((8, 9), r'block1\.0\.attn\.q\.weight \(8, 9\) and block1\.0\.attn\.kv\.weight \(16, 8\) do not fit'),
        ((9, 8), r'block1\.0\.attn\.\{q,kv\}\.weight \(25, 8\).*in_proj_weight \(24, 8\)'),
    ],
)
def test_wrong_sizes_are_named_by_the_keys_of_the_file(shape, named):
    state = random_state(official_shapes())
    state['block1.0.attn.q.weight'] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=named):
        load_pretrained(build('ours'), state)


def test_mixed_kinds_of_norms_have_a_gamma_each():
    """SLAB's PVTv2 has LayerNorm in the reductions of its softmax stages."""
    state = slab_state(0)
    name = 'block4.0.norm2'
    weight, bias = state[f'{name}.norm1.weight'], state[f'{name}.norm1.bias']
    state = {key: value for key, value in state.items() if not key.startswith(name)}
    state.update({f'{name}.weight': weight, f'{name}.bias': bias})
    report: LoadReport = load_pretrained(build('ours', norm_cfg=PREPBN, attention='sla'), state)
    assert report.gammas.pop('layers.3.1.1.norm2') == 1.0
    assert set(report.gammas.values()) == {0.0}


def test_output_norms_are_new_for_classifiers_of_v1():
    model = build('ours', norm_after_stage=True)
    report = load_pretrained(model, random_state(official_shapes()))
    assert report.complete, str(report)
    assert report.missing_expected == {
        f'layers.{stage}.2.{name}': 'output norm, new in detection' for stage in range(4) for name in ('weight', 'bias')
    }
