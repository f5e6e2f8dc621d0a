"""Random backbones, detectors and inputs: one seed, one case. See tests/test_fuzz.py."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch

OFFLINE_NORMS = ('TokenBN', 'RepBN', 'PRepBN', 'UN', 'MABN', 'PowerNorm')
ATTENTIONS = ('softmax', 'sla', 'focused')
# Kernel, stride and padding of a patch embedding: the first of a backbone, and the others.
FIRST_PATCHES = ((4, 4, 0), (7, 4, 3), (4, 4, 'corner'), (5, 4, 'same'), (2, 2, 0))
NEXT_PATCHES = ((2, 2, 0), (3, 2, 1), (2, 2, 'corner'), (3, 2, 'same'))


class Case(NamedTuple):
    """One draw."""

    seed: int
    part: str  # 'backbone', 'faster_rcnn' or 'mask_rcnn'
    backbone: dict
    neck: dict  # what differs from the FPN of the small detector
    size: tuple[int, int]  # (H, W) of the images
    batch: int
    dtype: torch.dtype  # of weights and images
    gamma: float  # of every PRepBN


def draw_case(seed: int) -> Case:
    """The case of a seed, the same on every machine."""
    rng = random.Random(seed)
    size = tuple(rng.choice((32, 33, 64, rng.randint(32, 100), rng.randint(32, 100) | 1)) for _ in range(2))
    draw_backbone = rng.choice(
        (_draw_swin, _draw_swin, _draw_pvt, _draw_pvt, _draw_stock_swin, _draw_stock_pvt, _draw_stock_pvt_v2)
    )
    backbone = draw_backbone(rng, size)
    return Case(
        seed=seed,
        part=rng.choice(('backbone', 'faster_rcnn', 'mask_rcnn')),
        backbone=backbone,
        neck=_draw_neck(rng, len(backbone['out_indices'])),
        size=size,
        batch=rng.choice((1, 1, 2, 3)),
        dtype=rng.choice((torch.float32, torch.float64)),
        gamma=rng.choice((0.0,) * 9 + (rng.uniform(0.01, 1.0),)),
    )


def _draw_norm(rng: random.Random) -> dict:
    kind = rng.choice((*OFFLINE_NORMS * 2, 'PRepBN', 'PRepBN', 'LN'))
    norm = dict(type=kind)
    if rng.random() < 0.5:
        norm['eps'] = rng.choice((1e-6, 1e-3))
    if kind == 'PRepBN' and rng.random() < 0.5:
        norm['ln_eps'] = 1e-6
    if kind == 'UN' and rng.random() < 0.5:
        norm['window_size'] = rng.randint(1, 5)
    return norm


def _draw_outputs(rng: random.Random, num_stages: int) -> tuple[int, ...]:
    """The stages that are outputs: mostly all of them, or some in any order."""
    if rng.random() < 0.6:
        return tuple(range(num_stages))
    return tuple(rng.sample(range(num_stages), rng.randint(1, num_stages)))


def _draw_stock_swin(rng: random.Random, size: tuple[int, int]) -> dict:
    """mmdet's SwinTransformer with a norm of ours. It takes images of any size."""
    num_stages = rng.randint(1, 4)
    embed_dims = rng.choice((4, 8, 12))
    dims = [embed_dims * 2**stage for stage in range(num_stages)]
    num_heads = [rng.choice([heads for heads in (1, 2, 3, 4, 6) if dim % heads == 0]) for dim in dims]
    patch_size = rng.choice((4, 4, 4, 2, 3))
    out_indices = _draw_outputs(rng, num_stages)
    return dict(
        type='SwinTransformer',
        embed_dims=embed_dims,
        depths=[rng.choice((1, 1, 2, 2, 3)) for _ in range(num_stages)],
        num_heads=num_heads,
        patch_size=patch_size,
        strides=[patch_size, *[2] * (num_stages - 1)],
        window_size=_draw_window(rng),
        mlp_ratio=rng.choice((1, 2, 4)),
        out_indices=out_indices,
        qkv_bias=rng.random() < 0.7,
        qk_scale=rng.choice((None, None, 0.3)),
        patch_norm=rng.random() < 0.8,
        act_cfg=dict(type=rng.choice(('GELU', 'ReLU'))),
        norm_cfg=_draw_norm(rng),
    )


def _draw_window(rng: random.Random) -> int:
    """From single tokens to windows larger than any map here."""
    return rng.choice((1, 2, 3, 4, 5, 7, 7, 8, 11, 16))


def _draw_swin(rng: random.Random, size: tuple[int, int]) -> dict:
    backbone = _draw_stock_swin(rng, size)
    num_stages = len(backbone['depths'])
    backbone.update(
        type='SLABSwin',
        use_abs_pos_embed=rng.random() < 0.3,
        pretrain_img_size=rng.choice((32, (48, 64))),
        attention=_draw_attention(rng, num_stages),
        with_cp=rng.random() < 0.3,
        ffn_norm=rng.choice((None, None, 'pre_act', 'post_act')),
        out_norm_cfg=rng.choice(('same', 'same', None, dict(type='LN'), _draw_norm(rng))),
        strides=[backbone['patch_size'], *(rng.choice((1, 2, 2, 2, 3)) for _ in range(num_stages - 1))],
    )
    if rng.random() < 0.5:
        backbone['window_sizes'] = [_draw_window(rng) for _ in range(num_stages)]
    return backbone


def _draw_attention(rng: random.Random, num_stages: int) -> str | list[str]:
    return rng.choice((rng.choice(ATTENTIONS), [rng.choice(ATTENTIONS) for _ in range(num_stages)]))


def _draw_stock_pvt(rng: random.Random, size: tuple[int, int]) -> dict:
    """mmdet's PVT, whose patches do not overlap unless it is V2."""
    return _draw_pvt_like(rng, size, 'PyramidVisionTransformer', ((4, 4, 0),), ((2, 2, 0),))


def _draw_stock_pvt_v2(rng: random.Random, size: tuple[int, int]) -> dict:
    backbone = _draw_pvt_like(rng, size, 'PyramidVisionTransformerV2', ((7, 4, 3),), ((3, 2, 1),), num_stages=4)
    # These it sets itself.
    for name in ('patch_sizes', 'paddings', 'use_abs_pos_embed', 'norm_after_stage', 'use_conv_ffn'):
        del backbone[name]
    return backbone


def _draw_pvt(rng: random.Random, size: tuple[int, int]) -> dict:
    backbone = _draw_pvt_like(rng, size, 'SLABPVT', FIRST_PATCHES, NEXT_PATCHES)
    num_stages = backbone['num_stages']
    backbone.update(
        attention=_draw_attention(rng, num_stages),
        la_sr_ratios=[rng.choice((1, 1, *{1, ratio})) for ratio in backbone['sr_ratios']],
        ffn_norm=None if backbone['use_conv_ffn'] else rng.choice((None, 'pre_act', 'post_act')),
    )
    return backbone


def _draw_pvt_like(
    rng: random.Random, size: tuple[int, int], kind: str, first: tuple, others: tuple, num_stages: int | None = None
) -> dict:
    num_stages = num_stages or rng.randint(1, 4)
    patches = [rng.choice(first if stage == 0 else others) for stage in range(num_stages)]
    # Learned positions need a map in pretraining too.
    pretrain_img_size = rng.choice((64, (64, 96)))
    has_positions = 64 >= math.prod(kernel for kernel, _, _ in patches) and rng.random() < 0.6
    smallest = (min(*size, 64),) * 2
    sr_ratios = []
    for patch in patches:
        smallest = tuple(_map_side(side, *patch) for side in smallest)
        sr_ratios.append(rng.randint(1, min(4, *smallest)))
    return dict(
        type=kind,
        pretrain_img_size=pretrain_img_size,
        embed_dims=rng.choice((4, 8)),
        num_stages=num_stages,
        num_layers=[rng.choice((1, 1, 2)) for _ in patches],
        num_heads=[rng.choice((1, 2, 3)) for _ in patches],
        patch_sizes=[kernel for kernel, _, _ in patches],
        strides=[stride for _, stride, _ in patches],
        paddings=[padding for _, _, padding in patches],
        sr_ratios=sr_ratios,
        out_indices=_draw_outputs(rng, num_stages),
        mlp_ratios=[rng.choice((1, 2, 4)) for _ in patches],
        qkv_bias=rng.random() < 0.7,
        use_abs_pos_embed=has_positions,
        norm_after_stage=rng.random() < 0.5,
        use_conv_ffn=rng.random() < 0.3,
        act_cfg=dict(type=rng.choice(('GELU', 'ReLU'))),
        norm_cfg=_draw_norm(rng),
    )


def _map_side(side: int, kernel: int, stride: int, padding: int | str) -> int:
    return math.ceil(side / stride) if isinstance(padding, str) else (side + 2 * padding - kernel) // stride + 1


def _draw_neck(rng: random.Random, num_levels: int) -> dict:
    start_level = rng.randint(0, 1) if num_levels > 1 else 0
    return dict(
        start_level=start_level,
        num_outs=num_levels - start_level + rng.randint(0, 1),
        add_extra_convs=rng.choice((False, 'on_input', 'on_lateral', 'on_output')),
        norm_cfg=rng.choice((None, dict(type='BN'))),
    )
