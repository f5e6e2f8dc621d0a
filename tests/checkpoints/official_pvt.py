"""Forwards of the official PVT, SLAB-PVT and SLAB-DeiT, written from their key names, as no package has them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# The stages of a small PVT.
DIMS, DEPTHS, HEADS, RATIOS, REDUCTIONS = (8, 16, 16, 32), (1, 2, 1, 1), (1, 2, 2, 4), (8, 8, 4, 4), (8, 4, 2, 1)


def official_shapes(version: int = 1, linear: bool = False) -> dict:
    """Shapes of a small PVT for images of 64, under the authors' names; ``linear``: of SLAB-PVT with LayerNorms."""
    shapes = {}

    def affine(name: str, *shape: int) -> None:
        shapes[f'{name}.weight'], shapes[f'{name}.bias'] = shape, shape[:1]

    previous = 3
    for i, (dim, depth, heads, ratio, r) in enumerate(zip(DIMS, DEPTHS, HEADS, RATIOS, REDUCTIONS, strict=True), 1):
        kernel = (4 if i == 1 else 2) if version == 1 else (7 if i == 1 else 3)
        affine(f'patch_embed{i}.proj', dim, previous, kernel, kernel)
        affine(f'patch_embed{i}.norm', dim)
        positions = (64 // 2 ** (i + 1)) ** 2
        if version == 1:
            shapes[f'pos_embed{i}'] = (1, positions + (i == 4 and not linear), dim)
        for block in (f'block{i}.{j}' for j in range(depth)):
            affine(f'{block}.norm1', dim)
            affine(f'{block}.attn.q', dim, dim)
            affine(f'{block}.attn.kv', 2 * dim, dim)
            affine(f'{block}.attn.proj', dim, dim)
            affine(f'{block}.norm2', dim)
            affine(f'{block}.mlp.fc1', ratio * dim, dim)
            affine(f'{block}.mlp.fc2', dim, ratio * dim)
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


def official_state(version: int = 1, linear: bool = False) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64)
        / math.sqrt(math.prod(shape[1:]) if len(shape) in (2, 4) else 2)
        + ('norm' in key)
        for key, shape in official_shapes(version, linear).items()
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
    """Attention with spatial reduction."""
    source = x
    if f'{name}.sr.weight' in state:
        reduced = conv(state, f'{name}.sr', to_image(x, h, w), state[f'{name}.sr.weight'].shape[-1])
        source = norm(state, f'{name}.norm', to_tokens(reduced))
    if f'{name}.qkv.weight' in state:
        q, k, v = linear(state, f'{name}.qkv', x).chunk(3, -1)
    else:
        q, (k, v) = linear(state, f'{name}.q', x), linear(state, f'{name}.kv', source).chunk(2, -1)
    return linear(state, f'{name}.proj', mix_heads(state, name, q, k, v, (h, w), heads))


def mix_heads(state: dict, name: str, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int], heads: int) -> Tensor:
    """Softmax attention, or linear where the state holds a table P; head by head."""
    is_linear = f'{name}.positional_encoding' in state
    if is_linear:
        q, k = q.relu(), (k + state[f'{name}.positional_encoding']).relu()
    mixed = []
    for q_h, k_h, v_h in zip(*(t.chunk(heads, -1) for t in (q, k, v)), strict=True):
        products = q_h @ k_h.transpose(1, 2)
        if is_linear:
            image = to_image(v_h, *hw_shape)
            local = to_tokens(conv(state, f'{name}.dwc', image, 1, padding=2, groups=v_h.shape[-1]))
            mixed.append(products / (products.sum(-1, keepdim=True) + 1e-6) @ v_h + local)
        else:
            mixed.append((products / math.sqrt(q_h.shape[-1])).softmax(-1) @ v_h)
    return torch.cat(mixed, -1)


def official_features(state: dict, image: Tensor, norm=official_norm) -> list[Tensor]:
    """One map per stage, as the authors' detectors compute it."""
    outs = []
    for i, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True), 1):
        kernel = state[f'patch_embed{i}.proj.weight'].shape[-1]
        overlap = kernel // 2 if kernel % 2 else 0
        image = conv(state, f'patch_embed{i}.proj', image, 4 if i == 1 else 2, padding=overlap)
        h, w = image.shape[2:]
        x = norm(state, f'patch_embed{i}.norm', to_tokens(image))
        if f'pos_embed{i}' in state:
            table = state[f'pos_embed{i}']
            side = math.isqrt(table.shape[1])
            table = to_image(table[:, -side * side :], side, side)
            x = x + to_tokens(F.interpolate(table, (h, w), mode='bilinear'))
        for block in (f'block{i}.{j}' for j in range(depth)):
            x = x + official_attention(state, f'{block}.attn', norm(state, f'{block}.norm1', x), h, w, heads, norm)
            hidden = linear(state, f'{block}.mlp.fc1', norm(state, f'{block}.norm2', x))
            name = f'{block}.mlp.dwconv.dwconv'
            if f'{name}.weight' in state:
                hidden = to_tokens(conv(state, name, to_image(hidden, h, w), 1, padding=1, groups=hidden.shape[-1]))
            x = x + linear(state, f'{block}.mlp.fc2', F.gelu(hidden))
        if f'norm{i}.weight' in state:
            x = norm(state, f'norm{i}', x)
        image = to_image(x, h, w)
        outs.append(image)
    return outs


def slab_deit_map(state: dict, image: Tensor, heads: int) -> Tensor:
    """The map whose average the authors' classifier reads."""
    image = conv(state, 'patch_embed.proj', image, 16)
    h, w = image.shape[2:]
    x = to_tokens(image) + state['pos_embed']
    for block in sorted({key[: len('blocks.0')] for key in state if key.startswith('blocks.')}):
        normed = slab_norm(state, f'{block}.norm1', x)
        x = x + official_attention(state, f'{block}.attn', normed, h, w, heads, slab_norm)
        hidden = linear(state, f'{block}.mlp.fc1', slab_norm(state, f'{block}.norm2', x))
        x = x + linear(state, f'{block}.mlp.fc2', F.gelu(hidden))
    return to_image(slab_norm(state, 'norm', x), h, w)


def slab_state(remaining: int | None, original: dict | None = None) -> dict:
    """A small SLAB-PVT, or ``original`` with SLAB's norms. ``remaining`` of 40 decay steps are left; None gives plain
    RepBN without counters."""
    state = {}
    for key, value in (original or official_state(linear=True)).items():
        name, _, part = key.rpartition('.')
        if not name.endswith(('norm', 'norm1', 'norm2')):
            state[key] = value
            continue
        prefix = name if remaining is None else f'{name}.norm2'
        state[f'{prefix}.bn.{part}'] = value
        if part == 'weight':
            state[f'{prefix}.bn.running_mean'] = torch.randn_like(value)
            state[f'{prefix}.bn.running_var'] = torch.rand_like(value) + 0.5
            state[f'{prefix}.bn.num_batches_tracked'] = torch.tensor(7)
            state[f'{prefix}.alpha'] = torch.full((1,), 0.75, dtype=torch.float64)
        if remaining is not None:
            state[f'{name}.norm1.{part}'] = value.flip(0)
            for counter, count in (('warm', 0), ('iter', remaining), ('total_step', 40)):
                state[f'{name}.{counter}'] = torch.tensor(count)
    return state
