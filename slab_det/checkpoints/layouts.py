"""Layouts of checkpoints, and how each is converted to mmdet's layout, which is the native one here.

| layout | models | source | what differs |
|---|---|---|---|
| native | all | mmdet and this project | nothing |
| microsoft_swin | Swin | github.com/microsoft/Swin-Transformer | names; the order of merged channels |
| timm_swin | Swin | timm >= 0.9 (older ones: microsoft_swin) | as microsoft_swin; patch merging begins a stage |
| official_pvt | PVT, PVTv2 | github.com/whai362/PVT, FLatten-PVT | stages from 1; q and kv apart; linear fc1, fc2 |
| timm_pvt_v2 | PVTv2 | timm.models.pvt_v2 | as official_pvt, under other names |
| official_vit | ViT, DeiT | github.com/facebookresearch/deit, timm | names; the class token's position apart |
| microsoft_cswin | CSWin | github.com/microsoft/CSWin-Transformer | stages from 1; names |
| slab_official | Swin, PVT, DeiT, CSWin | github.com/xinghaochen/SLAB | as the rows above; progressive norms |

Classifiers and detectors have the same layout. :mod:`slab_det.checkpoints.norms` fits norms of one kind to another.

In slab_official, a progressive norm ``n`` has the weights ``n.norm1.*`` (LayerNorm), ``n.norm2.bn.*`` and
``n.norm2.alpha`` (RepBN and its eta), and the counters ``n.warm``, ``n.iter`` and ``n.total_step``. A plain RepBN has
``n.bn.*`` and ``n.alpha``. A norm without counters has gamma 0: the released code evaluates ``norm2`` alone at the end.

In a PVT classifier the first row of ``pos_embed4`` is the position of ``cls_token``. LayerNorms of patch embeddings and
reductions have eps 1e-5 in PVT and 1e-6 in mmdet. mmdet's Swin pads a map before the shift; timm's Swin pads it after
the shift, and does not shift a map that is no larger than one window.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slab_det.common.errors import CheckpointError, name_some


class Weight(NamedTuple):
    """A tensor of a checkpoint; ``key`` is its name in the file, ``change`` says how its values were converted."""

    value: Tensor
    key: str
    change: str = ''

    def changed(self, value: Tensor, change: str) -> Weight:
        """Returns the weight with new values, and ``change`` added to the earlier changes."""
        return Weight(value, self.key, f'{self.change}, {change}' if self.change else change)


Weights = dict[str, Weight]


class Layout(NamedTuple):
    """A layout of checkpoints.

    Attributes:
        has: Patterns, each of which must match some key.
        renames: Patterns and their replacements, applied to each key one after the other.
        steps: Functions that turn the renamed weights into native ones, in this order.
        lacks: Patterns that must match no key.
    """

    name: str
    has: tuple[str, ...]
    renames: tuple[tuple[str, str | Callable[[re.Match], str]], ...] = ()
    steps: tuple[Callable[[Weights], Weights], ...] = ()
    lacks: tuple[str, ...] = ()

    def matches(self, keys: Collection[str]) -> bool:
        """Whether a file with these keys has the layout."""

        def occurs(pattern: str) -> bool:
            return any(re.search(pattern, key) for key in keys)

        return all(map(occurs, self.has)) and not any(map(occurs, self.lacks))

    def to_native(self, weights: Weights) -> Weights:
        """Gives weights the names, shapes and channel order of the native layout."""
        native = {}
        for key, weight in weights.items():
            for pattern, name in self.renames:
                key = re.sub(pattern, name, key)
            native[key] = weight
        for step in self.steps:
            native = step(native)
        return native


def find_layout(keys: Iterable[str], targets: Iterable[str]) -> Layout:
    """Finds the layout of a checkpoint by its keys; raises if they fit no layout and no ``targets``, a model's keys."""
    keys, targets = set(keys), set(targets)
    found = next((layout for layout in LAYOUTS if layout.matches(keys)), None)
    # Part of a model, or an architecture unknown here, in the native layout. Few common keys may be a coincidence.
    if found is None and 2 * len(keys & targets) > min(len(keys), len(targets)):
        return LAYOUTS[-1]
    if found is None:
        raise nothing_matched(sorted(keys), sorted(targets))
    return found


def nothing_matched(
    keys: Iterable[str], targets: Iterable[str], remedy: str = '', is_detector: bool = False
) -> CheckpointError:
    """Returns the error for a checkpoint that shares no key with the model; names a prefix that hides its weights."""
    keys, targets = [*keys], [*targets]
    if prefix := _find_prefix(keys, targets):
        remedy = (
            f'save the weights anew, each as key.removeprefix({prefix!r})'
            if is_detector
            else f"load them with prefix={prefix!r}, of load_pretrained or of init_cfg=dict(type='Pretrained', …)"
        )
        return CheckpointError(f'nothing matches the model before the prefix {prefix!r} is taken off: {remedy}')
    layouts = ', '.join(dict.fromkeys(layout.name for layout in LAYOUTS))
    return CheckpointError(
        f'nothing matches the model; the checkpoint has {name_some(keys)}, the model {name_some(targets)}; '
        f"known layouts are {layouts}: give a checkpoint of the model's family in one of them{remedy}"
    )


def _find_prefix(keys: Sequence[str], targets: Sequence[str]) -> str | None:
    """The shortest prefix without which keys are a model's, or have a known layout; None if there is none."""
    starts = {'.'.join(key.split('.')[:depth]) + '.' for key in keys for depth in (1, 2, 3)}
    for prefix in sorted(starts, key=lambda start: (len(start), start)):
        inner = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
        if 2 * len(inner.intersection(targets)) > min(len(inner), len(targets)) or any(
            layout.matches(inner) for layout in LAYOUTS
        ):
            return prefix
    return None


def _stage_before(template: str) -> Callable[[re.Match], str]:
    """Returns a replacement that lowers the stage number, the first group, by 1: native names count from 0."""
    return lambda match: template.format(int(match[1]) - 1)


def _to_unfold_order(weights: Weights) -> Weights:
    """Reorders the last dimension of patch merging, 4 C channels, to the order of mmdet's unfold.

    Microsoft, SLAB and timm concatenate four slices of C channels, at (row, column) (0, 0), (1, 0), (0, 1), (1, 1).
    unfold puts the four tokens of one channel next to each other, row by row.
    """
    native = dict(weights)
    for key, weight in weights.items():
        merged = weight.value
        # eta and counters have no channels.
        if '.downsample.' in key and merged.ndim and merged.shape[-1] % 4 == 0:
            by_token = merged.unflatten(-1, (2, 2, -1))  # (..., column, row, C)
            native[key] = weight.changed(by_token.transpose(-1, -3).flatten(-3), 'channel order of patch merging')
    return native


def _pack_projections(weights: Weights) -> Weights:
    """Stacks ``q`` and ``kv`` into one ``in_proj``."""
    packed = dict(weights)
    for key in weights:
        match = re.fullmatch(r'(.+\.attn\.)q\.(weight|bias)', key)
        if match is None:
            continue
        q, kv = (packed.pop(f'{match[1]}{part}.{match[2]}') for part in ('q', 'kv'))
        both = torch.cat([q.value, kv.value])
        file_key = q.key.replace('.attn.q.', '.attn.{q,kv}.')
        packed[f'{match[1]}attn.in_proj_{match[2]}'] = Weight(both, file_key, 'q and kv packed')
    return packed


def _finish_pvt(weights: Weights) -> Weights:
    """Numbers blocks as mmdet does, turns linear layers into 1x1 convolutions, drops the class token's position."""
    has_convs = any('.ffn.layers.1.' in key for key in weights)
    tables = sorted(key for key in weights if key.endswith('.pos_embed'))
    sizes = [weights[key].value.shape[1] for key in tables]
    # Official detectors keep the class token's position without the token; the SLAB authors' PVT has neither.
    # Each table has four times the rows of the next one, unless the last one has a row for the class token too.
    has_class_position = bool(tables) and ('cls_token' in weights or 4 * sizes[-1] != sizes[-2:][0])
    native = {}
    for key, weight in weights.items():
        if has_class_position and key == tables[-1]:
            weight = weight.changed(weight.value[:, 1:], "class token's position dropped")
        if re.search(r'\.ffn\.layers\.[03]\.weight$', key) and weight.value.ndim == 2:
            weight = weight.changed(weight.value[..., None, None], 'linear to 1x1 convolution')
        if tables:
            # mmdet counts the position embedding as the first block.
            key = re.sub(r'^(layers\.\d+\.1)\.(\d+)\.(?!pos_embed)', lambda m: f'{m[1]}.{int(m[2]) + 1}.', key)
        if has_convs:
            key = key.replace('.ffn.layers.3.', '.ffn.layers.4.')
        native[key] = weight
    return native


def _place_class_token(weights: Weights) -> Weights:
    """Moves the class token's position from the table into the token, where SLABViT has it."""
    token, table = weights.get('cls_token'), weights.get(VIT_POSITIONS)
    # The SLAB authors' DeiT has a class token that it does not use, without a position.
    if token is None or table is None or math.isqrt(table.value.shape[1]) ** 2 == table.value.shape[1]:
        return weights
    return weights | {
        'cls_token': token.changed(token.value + table.value[:, :1], 'its position added'),
        VIT_POSITIONS: table.changed(table.value[:, 1:], "class token's position dropped"),
    }


def _add_gammas(weights: Weights) -> Weights:
    """Replaces the counters of every progressive norm by its gamma.

    In the released code ``iter`` counts down from ``total_step`` once ``warm`` has counted down to 0, and
    gamma = iter / total_step.
    """
    native = dict(weights)
    for key, weight in weights.items():
        norm = key.removesuffix('.ln.weight')
        if f'{norm}.repbn.weight' not in weights:
            continue
        counters = [native.pop(f'{norm}.{name}', None) for name in ('warm', 'iter', 'total_step')]
        warm, remaining, total = (0.0 if counter is None else float(counter.value) for counter in counters)
        if counters[2] is None and (warm > 0 or remaining > 0):
            raise CheckpointError(
                f'{norm}.total_step is missing, and the decay is not finished (iter {remaining:g}, warm {warm:g}): '
                'gamma is unknown; get the whole checkpoint'
            )
        # With T = 0, as Table A1 has it for Swin-T, the released code divides 0 by 0.
        gamma = 1.0 if warm > 0 else min(max(remaining / total, 0.0), 1.0) if total > 0 else 0.0
        change = 'gamma 0 without counters' if counters[2] is None else 'gamma from counters'
        native[f'{norm}._gamma'] = weight.changed(torch.tensor(gamma, dtype=torch.float64), change)
    return native


SLAB_NORMS = (
    (r'\b(norm\d*)\.norm1\.', r'\1.ln.'),
    (r'\b(norm\d*)\.norm2\.bn\.', r'\1.repbn.'),
    (r'\b(norm\d*)\.norm2\.alpha$', r'\1.repbn.eta'),
    (r'\b(norm\d*)\.bn\.', r'\1.'),
    (r'\b(norm\d*)\.alpha$', r'\1.eta'),
)
MLP_NAMES = (
    (r'\.mlp\.fc1\.', '.ffn.layers.0.0.'),
    (r'\.mlp\.fc2\.', '.ffn.layers.1.'),
)
SWIN_NAMES = (
    (r'^layers\.', 'stages.'),
    (r'^patch_embed\.proj\.', 'patch_embed.projection.'),
    (r'\.attn\.', '.attn.w_msa.'),
    *MLP_NAMES,
)
PVT_NAMES = (
    (r'^(layers\.\d+\.0)\.proj\.', r'\1.projection.'),
    (r'\.attn\.proj\.', '.attn.attn.out_proj.'),
    (r'\.mlp\.fc1\.', '.ffn.layers.0.'),
    (r'\.mlp\.(dwconv\.)+', '.ffn.layers.1.'),
    (r'\.mlp\.fc2\.', '.ffn.layers.3.'),
)
OFFICIAL_PVT_NAMES = (
    (r'^pos_embed(\d+)$', _stage_before('layers.{}.1.0.pos_embed')),
    (r'^patch_embed(\d+)\.', _stage_before('layers.{}.0.')),
    (r'^block(\d+)\.', _stage_before('layers.{}.1.')),
    (r'^norm(\d+)\.', _stage_before('layers.{}.2.')),
    *PVT_NAMES,
)
TIMM_PVT_NAMES = (
    (r'^patch_embed\.', 'layers.0.0.'),
    (r'^stages\.(\d+)\.downsample\.', r'layers.\1.0.'),
    (r'^stages\.(\d+)\.blocks\.', r'layers.\1.1.'),
    (r'^stages\.(\d+)\.norm\.', r'layers.\1.2.'),
    *PVT_NAMES,
)
VIT_POSITIONS = 'positions.pos_embed'
VIT_NAMES = (
    (r'^patch_embed\.proj\.', 'embed.projection.'),
    (r'^pos_embed$', VIT_POSITIONS),
    (r'\.attn\.qkv\.', '.attn.attn.in_proj_'),
    (r'\.attn\.proj\.', '.attn.attn.out_proj.'),
    *MLP_NAMES,
)
CSWIN_NAMES = (
    (r'^stage1_conv_embed\.0\.', 'stages.0.0.projection.'),
    (r'^stage1_conv_embed\.2\.', 'stages.0.0.norm.'),
    (r'^merge(\d)\.conv\.', r'stages.\1.0.projection.'),
    (r'^merge(\d)\.norm\.', r'stages.\1.0.norm.'),
    (r'^norm(\d)\.', _stage_before('norm{}.')),
    (r'^stage(\d)\.', _stage_before('stages.{}.1.')),
    (r'\.qkv\.', '.attn.attn.in_proj_'),
    (r'\.proj\.', '.attn.attn.out_proj.'),
    (r'(\.attns\.\d\.)(?!get_v)', r'\1attn.'),
    (r'\.attns\.', '.attn.attns.'),
    *MLP_NAMES,
)
SWIN = r'^layers\.0\.blocks\.0\.attn\.qkv\.weight$'
PVT = r'^block1\.0\.attn\.kv\.weight$'
VIT = r'^blocks\.0\.attn\.qkv\.weight$'
CSWIN = r'^stage1\.0\.qkv\.weight$'
RELEASED_NORM = (r'\.alpha$', r'\.bn\.weight$')
# Swin V2 has the names of Swin, but scales the cosine of queries and keys.
SWIN_V2 = r'\.attn\.logit_scale$'

# find_layout takes the first that matches; the native layout must be the last.
LAYOUTS = (
    Layout('slab_official', (SWIN, *RELEASED_NORM), SLAB_NORMS + SWIN_NAMES, (_add_gammas, _to_unfold_order)),
    Layout(
        'slab_official',
        (PVT, *RELEASED_NORM),
        SLAB_NORMS + OFFICIAL_PVT_NAMES,
        (_add_gammas, _pack_projections, _finish_pvt),
    ),
    Layout('slab_official', (VIT, *RELEASED_NORM), SLAB_NORMS + VIT_NAMES, (_add_gammas, _place_class_token)),
    Layout(
        'slab_official',
        (CSWIN, *RELEASED_NORM),
        # Files hold a scale of focused attention that the released code does not read.
        ((r'(\.attns\.\d\.)scale$', r'\1unread_scale'), *CSWIN_NAMES, *SLAB_NORMS),
        (_add_gammas,),
    ),
    Layout('microsoft_cswin', (CSWIN,), CSWIN_NAMES),
    Layout('official_vit', (VIT,), VIT_NAMES, (_place_class_token,)),
    Layout('official_pvt', (PVT,), OFFICIAL_PVT_NAMES, (_pack_projections, _finish_pvt)),
    Layout(
        'timm_swin',
        (SWIN, r'^layers\.1\.downsample\.'),
        ((r'^layers\.(\d+)\.downsample\.', _stage_before('layers.{}.downsample.')), *SWIN_NAMES),
        (_to_unfold_order,),
        lacks=(SWIN_V2, r'^layers\.0\.downsample\.'),
    ),
    Layout(
        'timm_pvt_v2', (r'^stages\.0\.blocks\.0\.attn\.kv\.weight$',), TIMM_PVT_NAMES, (_pack_projections, _finish_pvt)
    ),
    Layout('microsoft_swin', (SWIN,), SWIN_NAMES, (_to_unfold_order,), lacks=(SWIN_V2,)),
    Layout(
        'native',
        (r'^(stages\.0\.blocks\.0\.attn\.w_msa\.qkv|(layers|stages)\.0\.0\.projection|embed\.projection)\.weight$',),
    ),
)
