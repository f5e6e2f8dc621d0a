"""Every layout of checkpoints that is known here, and how its weights become those of mmdet's layout, which is ours.

| layout | models | source | what differs |
|---|---|---|---|
| native | Swin, PVT, PVTv2 | mmdet and this project | nothing |
| microsoft_swin | Swin | github.com/microsoft/Swin-Transformer | names; the order of merged channels |
| timm_swin | Swin | timm >= 0.9 (older ones have Microsoft's) | the same; patch merging begins a stage |
| official_pvt | PVT, PVTv2 | github.com/whai362/PVT, FLatten-PVT | stages from 1; q and kv apart; linear fc1, fc2 |
| timm_pvt_v2 | PVTv2 | timm.models.pvt_v2 | the same under other names |
| slab_official | Swin, PVT | github.com/xinghaochen/SLAB | Microsoft's or PVT's; progressive norms and counters |

Classifiers and detectors have the same layout. Norms keep their kind here; :mod:`slab_det.checkpoints.norms` fits them.

A progressive norm ``n`` of slab_official is ``n.norm1.*`` (LayerNorm), ``n.norm2.bn.*``, ``n.norm2.alpha`` (RepBN and
its eta) and the counters ``n.warm``, ``n.iter``, ``n.total_step``; a plain RepBN is ``n.bn.*`` and ``n.alpha``. Without
its counters a norm has gamma 0, as the released code evaluates ``norm2`` alone at the end.

PVT's LayerNorm has eps 1e-6 in the blocks and 1e-5 in patch embeddings and reductions; mmdet's has 1e-6 everywhere. A
classifier of PVT ends in ``cls_token``, whose position is the first row of ``pos_embed4``.

timm's Swin is not everywhere the function that Microsoft's and mmdet's detectors compute: timm does not shift windows
where the map is no larger than one (the last stage at 224), and pads maps after the shift instead of before. Where
windows fill the map both compute the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slab_det.checkpoints.report import name_some
from slab_det.runtime.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of a checkpoint and what has happened to it.

    Attributes:
        value: The tensor.
        key: Its name in the file.
        change: How its values differ from the file's; empty if only its name does.
    """

    value: Tensor
    key: str
    change: str = ''

    def changed(self, value: Tensor, change: str) -> Weight:
        """This weight with other values and the reason for them."""
        return replace(self, value=value, change=f'{self.change}, {change}' if self.change else change)


Weights = dict[str, Weight]


class CheckpointFormat(NamedTuple):
    """A layout of checkpoints.

    Attributes:
        name: What ``source`` and the report call it.
        matches: Whether a file with these keys has the layout.
        convert: Gives weights the names and the channel order of our own layout. Norms keep their kind.
        notes: What to know about converted weights of this layout in a model.
    """

    name: str
    matches: Callable[[set[str]], bool]
    convert: Callable[[Weights], Weights]
    notes: Callable[[nn.Module, Weights], list[str]] = lambda model, weights: []


SWIN_RENAMES = (
    (r'^layers\.', 'stages.'),
    (r'^patch_embed\.proj\.', 'patch_embed.projection.'),
    (r'\.attn\.', '.attn.w_msa.'),
    (r'\.mlp\.fc1\.', '.ffn.layers.0.0.'),
    (r'\.mlp\.fc2\.', '.ffn.layers.1.'),
)
MERGED_CHANNELS = re.compile(r'\.downsample\.(reduction\.weight|norm\.(\w+\.)*(weight|bias|running_mean|running_var))$')


def is_swin(keys: set[str]) -> bool:
    """Whether the keys are those of a Swin in Microsoft's or timm's layout."""
    # Swin V2 has the same names, but scales the cosine of queries and keys.
    return 'layers.0.blocks.0.attn.qkv.weight' in keys and 'layers.0.blocks.0.attn.logit_scale' not in keys


def is_foreign_swin(keys: set[str]) -> bool:
    """Whether the keys are those of a Swin whose patch merging ends a stage, as in Microsoft's code."""
    # timm puts patch merging at the start of the next stage.
    return is_swin(keys) and (
        'layers.0.downsample.reduction.weight' in keys or not any('.downsample.' in key for key in keys)
    )


def to_unfold_order(merged: Tensor) -> Tensor:
    """Reorders the 4 C channels of a merged 2x2 block, the last dimension.

    Microsoft, SLAB and timm concatenate four slices, at (row, column) (0, 0), (1, 0), (0, 1), (1, 1); mmdet unfolds:
    channel c is followed by its four places, row by row.
    """
    by_place = merged.unflatten(-1, (2, 2, -1))  # (..., column, row, C)
    return by_place.transpose(-1, -3).flatten(-3)


def to_native_swin(weights: Weights) -> Weights:
    """Renames and reorders a Microsoft-style Swin, whatever its norms are made of."""
    native = {}
    for key, weight in weights.items():
        if MERGED_CHANNELS.search(key):
            weight = weight.changed(to_unfold_order(weight.value), 'channel order of patch merging')
        for pattern, replacement in SWIN_RENAMES:
            key = re.sub(pattern, replacement, key)
        native[key] = weight
    return native


def is_timm_swin(keys: set[str]) -> bool:
    """Whether patch merging begins a stage, as in timm since 0.9."""
    return (
        is_swin(keys)
        and 'layers.1.downsample.reduction.weight' in keys
        and not any(key.startswith('layers.0.downsample.') for key in keys)
    )


def from_timm_swin(weights: Weights) -> Weights:
    """Moves patch merging to the end of the stage before, as in Microsoft's layout."""
    pattern = re.compile(r'^layers\.(\d+)\.downsample\.')
    return to_native_swin(
        {
            pattern.sub(lambda match: f'layers.{int(match[1]) - 1}.downsample.', key): weight
            for key, weight in weights.items()
        }
    )


# The stage's number is the first group, the block's the second.
PVT_STAGES = (
    (r'^pos_embed(\d+)$', 'layers.{stage}.1.0.pos_embed'),
    (r'^patch_embed(\d+)\.proj\.', 'layers.{stage}.0.projection.'),
    (r'^patch_embed(\d+)\.norm\.', 'layers.{stage}.0.norm.'),
    (r'^block(\d+)\.(\d+)\.', 'layers.{stage}.1.{block}.'),
    (r'^norm(\d+)\.', 'layers.{stage}.2.'),
)
PVT_BLOCKS = (
    ('.attn.proj.', '.attn.attn.out_proj.'),
    ('.mlp.fc1.', '.ffn.layers.0.'),
    ('.mlp.dwconv.dwconv.', '.ffn.layers.1.'),
)
PATCH_OR_REDUCTION_NORM = re.compile(r'layers\.\d+\.(0|1\.\d+\.attn)\.norm')


def is_official_pvt(keys: Iterable[str]) -> bool:
    """Whether the keys are those of whai362's PVT or PVTv2, whatever its norms and attention are made of."""
    return {'patch_embed1.proj.weight', 'block1.0.attn.q.weight', 'block1.0.attn.kv.weight'} <= set(keys)


def to_native_pvt(weights: Weights) -> Weights:
    """Renames a PVT in the official layout, packs q and kv, and drops the class token's position.

    Raises:
        CheckpointError: If q and kv do not fit each other.
    """
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
        if PATCH_OR_REDUCTION_NORM.fullmatch(name)
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
    for pattern, replacement in PVT_STAGES:
        match = re.match(pattern, key)
        if match is None:
            continue
        stage, *block = (int(group) for group in match.groups())
        key = replacement.format(stage=stage - 1, block=sum(block) + first_block) + key[match.end() :]
        for official, native in (*PVT_BLOCKS, ('.mlp.fc2.', f'.ffn.layers.{fc2}.')):
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
    before = weights.get(f'pos_embed{int(last.removeprefix("pos_embed")) - 1}')
    if 'cls_token' not in weights and before is not None and 4 * value.shape[1] == before.value.shape[1]:
        return weights
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


def _any_matches(pattern: str, keys: Iterable[str]) -> bool:
    return any(re.search(pattern, key) for key in keys)


TIMM_PVT_RENAMES = (
    (r'^patch_embed\.', r'patch_embed1.'),
    (r'^stages\.(\d+)\.downsample\.', r'patch_embed{}.'),
    (r'^stages\.(\d+)\.blocks\.', r'block{}.'),
    (r'^stages\.(\d+)\.norm\.', r'norm{}.'),
    (r'\.mlp\.dwconv\.', r'.mlp.dwconv.dwconv.'),
)


def from_timm_pvt_v2(weights: Weights) -> Weights:
    """timm's names as the official ones, whose stages count from 1."""
    official = {}
    for key, weight in weights.items():
        for pattern, name in TIMM_PVT_RENAMES:
            key = re.sub(pattern, lambda match: name.format(*(int(i) + 1 for i in match.groups())), key)  # noqa: B023
        official[key] = weight
    return to_native_pvt(official)


NO_COUNTERS = 'gamma 0 for want of counters'


def is_slab_official(keys: set[str]) -> bool:
    return (is_foreign_swin(keys) or is_official_pvt(keys)) and bool(
        any(key.endswith('.total_step') for key in keys) or _repbn_names(keys)
    )


def from_slab_official(weights: Weights) -> Weights:
    weights = _plain_repbn(_progressive_norms(weights))
    return to_native_pvt(weights) if is_official_pvt(weights) else to_native_swin(weights)


def _progressive_norms(weights: Weights) -> Weights:
    result = dict(weights)
    for norm in sorted(_progressive_names(weights)):
        result[f'{norm}._gamma'] = _pop_gamma(norm, result)
        _rename(result, f'{norm}.norm1.', f'{norm}.ln.')
        _rename(result, f'{norm}.norm2.bn.', f'{norm}.repbn.')
        _rename(result, f'{norm}.norm2.alpha', f'{norm}.repbn.eta')
    return result


def _progressive_names(keys: Iterable[str]) -> set[str]:
    keys = set(keys)
    counted = {key.removesuffix('.total_step') for key in keys if key.endswith('.total_step')}
    candidates = {name.removesuffix('.norm2') for name in _repbn_names(keys) if name.endswith('.norm2')} - counted
    # A block whose norm2 is a plain RepBN also holds `norm1.…` and `norm2.bn.…`, and besides them attention and MLP.
    parts = {name: set() for name in candidates if f'{name}.norm1.weight' in keys}
    for key in keys:
        components = key.split('.')
        for length in range(1, len(components)):
            name = '.'.join(components[:length])
            if name in parts:
                parts[name].add(components[length])
    return counted | {name for name, found in parts.items() if found <= {'norm1', 'norm2', 'iter', 'warm'}}


def _pop_gamma(norm: str, weights: dict[str, Weight]) -> Weight:
    """gamma of a progressive norm, whose counters leave ``weights``."""
    total_step, *others = (weights.pop(f'{norm}.{name}', None) for name in ('total_step', 'iter', 'warm'))
    remaining, warm = (0.0 if weight is None else float(weight.value) for weight in others)
    if total_step is not None:
        gamma, change = gamma_of_counters(remaining, float(total_step.value), warm), 'gamma from counters'
    elif remaining > 0 or warm > 0:
        raise CheckpointError(
            f'{norm}.total_step is missing, and the decay is not finished (iter {remaining:g}, warm '
            f'{warm:g}): gamma cannot be known; get the whole checkpoint'
        )
    else:
        gamma, change = 0.0, NO_COUNTERS
    stands_for = total_step or weights[f'{norm}.norm1.weight']
    return stands_for.changed(torch.tensor(gamma, dtype=torch.float64), change)


def _repbn_names(keys: Iterable[str]) -> set[str]:
    # DyT has an alpha too, but no BatchNorm beside it.
    keys = set(keys)
    return {
        key.removesuffix('.alpha')
        for key in keys
        if key.endswith('.alpha') and f'{key.removesuffix("alpha")}bn.weight' in keys
    }


def note_no_counters(model: nn.Module, weights: Weights) -> list[str]:
    count = sum(weight.change == NO_COUNTERS for weight in weights.values())
    if not count:
        return []
    return [
        f'{count} progressive norms have no counters in the file: taken as finished, gamma 0, which is what the '
        'released code evaluates at the end'
    ]


def _plain_repbn(weights: Weights) -> Weights:
    result = dict(weights)
    for norm in _repbn_names(weights):
        _rename(result, f'{norm}.bn.', f'{norm}.')
        _rename(result, f'{norm}.alpha', f'{norm}.eta')
    return result


def gamma_of_counters(remaining: float, total: float, warm: float) -> float:
    """gamma of the released code: ``iter`` counts down from ``total_step`` once ``warm`` has counted down to 0."""
    if warm > 0:
        return 1.0
    # Trained with T = 0, as Table A1 prints for Swin-T; the released code divides 0 by 0.
    if total <= 0:
        return 0.0
    return min(max(remaining / total, 0.0), 1.0)


def _rename(weights: dict[str, Weight], old_prefix: str, new_prefix: str) -> None:
    for key in [key for key in weights if key.startswith(old_prefix)]:
        weights[new_prefix + key[len(old_prefix) :]] = weights.pop(key)


FORMATS = (
    CheckpointFormat('slab_official', is_slab_official, from_slab_official, note_no_counters),
    CheckpointFormat('official_pvt', is_official_pvt, to_native_pvt, note_norm_eps),
    CheckpointFormat('timm_swin', is_timm_swin, from_timm_swin),
    CheckpointFormat(
        'timm_pvt_v2',
        lambda keys: {'stages.0.blocks.0.attn.q.weight', 'stages.0.blocks.0.attn.kv.weight'} <= keys,
        from_timm_pvt_v2,
        note_norm_eps,
    ),
    CheckpointFormat(
        'microsoft_swin',
        lambda keys: is_foreign_swin(keys) and 'layers.0.blocks.0.norm1.weight' in keys,
        to_native_swin,
    ),
    CheckpointFormat(
        'native',
        lambda keys: bool({'stages.0.blocks.0.attn.w_msa.qkv.weight', 'layers.0.0.projection.weight'} & keys),
        lambda weights: weights,
    ),
)


# What errors call a checkpoint, by a key that only its family has: those we read, for a model of another of them,
# and those that share some key names with ours.
FAMILIES = (
    (r'^(layers|stages)\.\d+\.blocks\.\d+\.attn\.(logit_scale|meta_mlp\.fc1\.weight)$', 'Swin V2'),
    (r'^layers\.\d+\.blocks\.\d+\.attn\.qkv\.weight$', 'Swin'),
    (r'^stages\.0\.blocks\.0\.attn\.w_msa\.qkv\.weight$', 'mmdet Swin'),
    (r'^patch_embed1\.', 'PVT'),
    (r'^layers\.0\.0\.projection\.', 'mmdet PVT'),
    (r'^stages\.\d+\.blocks\.\d+\.attn\.(q|kv)\.', 'timm PVTv2'),
    (r'^stage1_conv_embed\.', 'CSwin'),
    (r'^cls_token$|^blocks\.0\.', 'DeiT or ViT'),
    (r'^layer1\.0\.conv1\.', 'ResNet'),
    (r'^downsample_layers\.|^stages\.0\.blocks\.0\.(conv_dw|gamma)', 'ConvNeXt'),
)


def find_format(keys: set[str], targets: set[str], source: str | None, name: str) -> CheckpointFormat:
    """The layout called ``source``, or the one that ``keys`` have.

    Raises:
        CheckpointError: If they have none of those known.
        ValueError: If ``source`` is unknown.
    """
    by_name = {layout.name: layout for layout in FORMATS}
    if source is not None:
        if source not in by_name:
            raise ValueError(f'unknown source {source!r}: choose from {sorted(by_name)}')
        return by_name[source]
    for layout in FORMATS:
        if layout.matches(keys):
            return layout
    # A part of a model, or another architecture in its own layout. A key in common may be a coincidence.
    if 2 * len(keys & targets) > min(len(keys), len(targets)):
        return by_name['native']
    raise nothing_matched(name, sorted(keys), sorted(targets))


def family_of(keys: Iterable[str]) -> str | None:
    """The family of models that has such keys."""
    keys = list(keys)
    return next((family for pattern, family in FAMILIES if any(re.search(pattern, key) for key in keys)), None)


def nothing_matched(name: str, keys: Iterable[str], targets: Iterable[str]) -> CheckpointError:
    """The error of a checkpoint none of whose keys the model has."""
    keys = list(keys)
    family = family_of(keys)
    looks = f' looks like {family}' if family else ''
    return CheckpointError(
        f'{name}{looks}: nothing matches the model; the checkpoint has {name_some(keys)}, the model '
        f'{name_some(targets)}; known layouts are {", ".join(layout.name for layout in FORMATS)}: give a checkpoint of '
        "the model's family in one of them"
    )
