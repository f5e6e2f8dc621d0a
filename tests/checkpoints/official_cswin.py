"""The forwards of Microsoft's CSWin and of the SLAB authors', written from their key names, stripe by stripe."""

import torch
import torch.nn.functional as F
from official_pvt import conv, layer_norm, linear, mix_heads, slab_norm, to_image, to_tokens
from torch import Tensor

# The stages of a small CSWin.
DIMS, DEPTHS, HEADS, WIDTHS = (8, 16, 32, 64), (1, 2, 1, 1), (2, 2, 4, 4), (1, 3, 3, None)
# SLAB's: linear attention over the whole map in the first two stages.
SLAB_WIDTHS = (None, None, 3, None)


def names_of_patches(stage: int) -> tuple[str, str]:
    """Convolution and norm before a stage, which counts from 1."""
    if stage == 1:
        return 'stage1_conv_embed.0', 'stage1_conv_embed.2'
    return f'merge{stage - 1}.conv', f'merge{stage - 1}.norm'


def cswin_state(slab: bool) -> dict[str, Tensor]:
    """Random weights in the authors' names; ``slab``: of SLAB's classifier for images of 64, whose decay is over."""
    state = {}

    def draw(key: str, *shape: int) -> None:
        state[key] = torch.randn(shape, dtype=torch.float64) / torch.Size(shape[1:]).numel() ** 0.5

    def affine(name: str, *shape: int) -> None:
        draw(f'{name}.weight', *shape)
        draw(f'{name}.bias', shape[0])

    def norm(name: str, dim: int) -> None:
        affine(f'{name}.norm1' if slab else name, dim)
        if slab:
            affine(f'{name}.norm2.bn', dim)
            draw(f'{name}.norm2.bn.running_mean', dim)
            state[f'{name}.norm2.bn.running_var'] = torch.rand(dim, dtype=torch.float64) + 0.5
            state[f'{name}.norm2.alpha'] = torch.full((1,), 0.75, dtype=torch.float64)
            for counter, count in (('warm', 0), ('iter', 0), ('total_step', 120000)):
                state[f'{name}.{counter}'] = torch.tensor(count)

    previous = 3
    for i, (dim, depth, heads) in enumerate(zip(DIMS, DEPTHS, HEADS, strict=True), 1):
        patches, patch_norm = names_of_patches(i)
        affine(patches, dim, previous, *((7, 7) if i == 1 else (3, 3)))
        norm(patch_norm, dim)
        for block in (f'stage{i}.{j}' for j in range(depth)):
            norm(f'{block}.norm1', dim)
            affine(f'{block}.qkv', 3 * dim, dim)
            affine(f'{block}.proj', dim, dim)
            norm(f'{block}.norm2', dim)
            affine(f'{block}.mlp.fc1', 4 * dim, dim)
            affine(f'{block}.mlp.fc2', dim, 4 * dim)
            branches = 1 if (SLAB_WIDTHS if slab else WIDTHS)[i - 1] is None else 2
            for attn in (f'{block}.attns.{j}' for j in range(branches)):
                affine(f'{attn}.get_v', dim // branches, 1, 3, 3)
                if slab and i <= 2:
                    draw(f'{attn}.scale', 1, 1, dim)
                    draw(f'{attn}.positional_encoding', 1, (64 // 2 ** (i + 1)) ** 2, dim)
                    affine(f'{attn}.dwc', dim // heads, 1, 5, 5)
        if not slab:
            norm(f'norm{i}', dim)
        previous = dim
    norm('norm', previous)
    affine('head', 10, previous)
    return state


def cswin_features(state: dict, image: Tensor) -> list[Tensor]:
    """One map per stage, as in Microsoft's code for segmentation; SLAB's before its norm."""
    slab = 'norm.norm2.alpha' in state

    def norm(name: str, x: Tensor) -> Tensor:
        return slab_norm(state, name, x) if slab else layer_norm(state, name, x, 1e-5)

    outs = []
    for i, (depth, heads, width) in enumerate(zip(DEPTHS, HEADS, SLAB_WIDTHS if slab else WIDTHS, strict=True), 1):
        patches, patch_norm = names_of_patches(i)
        image = conv(state, patches, image, stride=4 if i == 1 else 2, padding=2 if i == 1 else 1)
        h, w = image.shape[2:]
        x = norm(patch_norm, to_tokens(image))
        for block in (f'stage{i}.{j}' for j in range(depth)):
            qkv = to_image(linear(state, f'{block}.qkv', norm(f'{block}.norm1', x)), h, w).chunk(3, 1)
            dims = (3,) if width is None else (3, 2)
            mixed = [
                stripes(state, f'{block}.attns.{j}', parts, heads // len(dims), dim, width)
                for j, (dim, *parts) in enumerate(zip(dims, *(t.chunk(len(dims), 1) for t in qkv), strict=True))
            ]
            x = x + linear(state, f'{block}.proj', to_tokens(torch.cat(mixed, 1)))
            hidden = linear(state, f'{block}.mlp.fc1', norm(f'{block}.norm2', x))
            x = x + linear(state, f'{block}.mlp.fc2', F.gelu(hidden))
        image = to_image(x, h, w)
        outs.append(image if slab else to_image(norm(f'norm{i}', x), h, w))
    return outs


def stripes(state: dict, name: str, qkv: list[Tensor], heads: int, dim: int, width: int | None) -> Tensor:
    """Attention of images in stripes along dimension ``dim``, which get zeros on both of its sides."""
    side = qkv[0].shape[dim]
    width = width or side
    missing = -side % width
    pads = (missing // 2, missing - missing // 2)
    padded = [F.pad(t, pads if dim == 3 else (0, 0, *pads)) for t in qkv]
    outs = []
    for q, k, v in zip(*(t.split(width, dim) for t in padded), strict=True):
        shape = v.shape[2:]
        mixed = mix_heads(state, name, *map(to_tokens, (q, k, v)), shape, heads)
        outs.append(to_image(mixed, *shape) + conv(state, f'{name}.get_v', v, 1, padding=1, groups=v.shape[1]))
    return torch.cat(outs, dim).narrow(dim, missing // 2, side)
