"""What all foreign PVT layouts share: the official key names, numbered from 1, and how they become mmdet's."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from slab_det.checkpoints.weight import Weight, Weights
from slab_det.runtime.errors import CheckpointError

# The stage's number is the first group, the block's the second.
_STAGES = (
    (r'^pos_embed(\d+)$', 'layers.{stage}.1.0.pos_embed'),
    (r'^patch_embed(\d+)\.proj\.', 'layers.{stage}.0.projection.'),
    (r'^patch_embed(\d+)\.norm\.', 'layers.{stage}.0.norm.'),
    (r'^block(\d+)\.(\d+)\.', 'layers.{stage}.1.{block}.'),
    (r'^norm(\d+)\.', 'layers.{stage}.2.'),
)
_BLOCKS = (
    ('.attn.proj.', '.attn.attn.out_proj.'),
    ('.mlp.fc1.', '.ffn.layers.0.'),
    ('.mlp.dwconv.dwconv.', '.ffn.layers.1.'),
)
_PATCH_OR_REDUCTION_NORM = re.compile(r'layers\.\d+\.(0|1\.\d+\.attn)\.norm')


def is_official_pvt(keys: Iterable[str]) -> bool:
    """Whether the keys are those of whai362's PVT or PVTv2, whatever its norms and attention are made of."""
    return {'patch_embed1.proj.weight', 'block1.0.attn.q.weight', 'block1.0.attn.kv.weight'} <= set(keys)


def to_native_pvt(weights: Weights) -> Weights:
    """Renames a PVT in the official layout, packs q and kv, and drops the class token's position.

    Raises:
        CheckpointError: If it reduces keys and values by pooling, as PVTv2's linear variant, or q and kv do not fit
            each other.
    """
    _refuse_pooling(weights)
    weights = _pack_projections(_drop_class_position(weights))
    # mmdet's embedding is the first of the blocks, and its fc2 stands behind the depth-wise convolution.
    first_block = int(any(key.startswith('pos_embed') for key in weights))
    fc2 = 4 if any('.mlp.dwconv.' in key for key in weights) else 3
    native = {}
    for key, weight in weights.items():
        if re.search(r'\.mlp\.fc[12]\.weight$', key) and weight.value.ndim == 2:
            weight = weight.changed(weight.value[..., None, None], 'linear to 1x1 convolution')
        native[_native_key(key, first_block, fc2)] = weight
    return native


def note_norm_eps(model: nn.Module, weights: Weights) -> list[str]:
    """Says so if norms of patch embeddings and reductions have another eps than where PVT's weights were trained."""
    found = [
        getattr(module, 'ln', module)
        for name, module in model.named_modules()
        if _PATCH_OR_REDUCTION_NORM.fullmatch(name)
    ]
    others = [norm.eps for norm in found if isinstance(norm, nn.LayerNorm) and norm.eps != 1e-5]
    if not others:
        return []
    return [
        f'{len(others)} norms of patch embeddings and spatial reductions have eps {others[0]:g} as in mmdet, '
        'and had 1e-05 when these weights were trained'
    ]


def check_pvt_options(weights: Weights, targets: Iterable[str], name: str) -> None:
    """Refuses weights whose blocks would land in other places of the model, because of what stands between them.

    Args:
        weights: Weights in mmdet's layout.
        targets: Keys of the model.
        name: The file, for the error.

    Raises:
        CheckpointError: If only one of both has position embeddings, or depth-wise convolutions.
    """
    options = {'use_abs_pos_embed': r'^layers\.\d+\.1\.0\.pos_embed$', 'use_conv_ffn': r'\.ffn\.layers\.4\.'}
    blocks = r'^layers\.\d+\.1\.\d+\.ffn\.'
    if not (_any_matches(blocks, weights) and _any_matches(blocks, targets)):
        return
    given = {option: _any_matches(pattern, weights) for option, pattern in options.items()}
    wrong = [f'{option}={value}' for option, value in given.items() if value != _any_matches(options[option], targets)]
    if wrong:
        raise CheckpointError(
            f'{name} is of a PVT with {", ".join(wrong)}, the model is not; set this in the backbone of the config '
            '(PVT: use_abs_pos_embed=True, use_conv_ffn=False; PVTv2 the reverse)'
        )


def _native_key(key: str, first_block: int, fc2: int) -> str:
    for pattern, replacement in _STAGES:
        match = re.match(pattern, key)
        if match is None:
            continue
        stage, *block = (int(group) for group in match.groups())
        key = replacement.format(stage=stage - 1, block=sum(block) + first_block) + key[match.end() :]
        for official, native in (*_BLOCKS, ('.mlp.fc2.', f'.ffn.layers.{fc2}.')):
            key = key.replace(official, native)
        break
    return key


def _drop_class_position(weights: Weights) -> Weights:
    """The last stage's table without its first row, which is the class token's in PVT's classifiers."""
    tables = [key for key in weights if re.fullmatch(r'pos_embed\d+', key)]
    if not tables:
        return weights
    last = max(tables, key=lambda key: int(key.removeprefix('pos_embed')))
    value = weights[last].value
    # Official detectors keep the row but not the token; the SLAB authors' PVT has neither. Of both, the stage before
    # has four times as many positions as this one.
    if 'cls_token' not in weights:
        before = weights.get(f'pos_embed{int(last.removeprefix("pos_embed")) - 1}')
        length, quarter = value.shape[1], before.value.shape[1] / 4 if before is not None else None
        if length == quarter:
            return weights
        if length - 1 != quarter:
            raise CheckpointError(
                f"{weights[last].key} has {length} positions, neither a quarter of the stage before's nor one more: "
                'whether its first row is that of a class token cannot be known; give a checkpoint with cls_token, or '
                'one in the native layout'
            )
    return {**weights, last: weights[last].changed(value[:, 1:], "class token's position dropped")}


def _pack_projections(weights: Weights) -> Weights:
    """``q`` and ``kv`` as the rows of one ``in_proj``."""
    packed = dict(weights)
    for key, q in weights.items():
        match = re.fullmatch(r'(.+\.attn\.)q\.(weight|bias)', key)
        kv = packed.get(f'{match[1]}kv.{match[2]}') if match else None
        if kv is None:
            continue
        if q.value.shape[1:] != kv.value.shape[1:]:
            raise CheckpointError(
                f'{q.key} {tuple(q.value.shape)} and {kv.key} {tuple(kv.value.shape)} do not fit '
                'each other: the checkpoint is damaged, get it again'
            )
        del packed[key], packed[f'{match[1]}kv.{match[2]}']
        both = Weight(torch.cat([q.value, kv.value]), q.key.replace('.attn.q.', '.attn.{q,kv}.'), q.change)
        packed[f'{match[1]}attn.in_proj_{match[2]}'] = both.changed(both.value, 'q and kv packed')
    return packed


def _refuse_pooling(weights: Weights) -> None:
    for key, weight in weights.items():
        if key.endswith('.attn.sr.weight') and weight.value.shape[2:] == (1, 1):
            raise CheckpointError(
                f'looks like the linear variant of PVTv2 ({weight.key} is 1x1), which pools keys and values to 7x7; '
                'no backbone here does: give a checkpoint of PVT or PVTv2 without "li"'
            )


def _any_matches(pattern: str, keys: Iterable[str]) -> bool:
    return any(re.search(pattern, key) for key in keys)
