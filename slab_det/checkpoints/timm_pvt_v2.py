"""timm's PVTv2 layout (timm.models.pvt_v2), which is the official one under other names.

``patch_embed`` and from the second stage on ``stages.{i}.downsample`` (each ``proj``, ``norm``),
``stages.{i}.blocks.{j}.*`` as in the official ``block{i + 1}.{j}.*`` but for ``mlp.dwconv``, ``stages.{i}.norm``.
Norms have the eps of the official layout.
"""

from __future__ import annotations

import re

from slab_det.checkpoints.pvt_layout import note_norm_eps, to_native_pvt
from slab_det.checkpoints.weight import CheckpointFormat, Weights

_RENAMES = (
    (r'^patch_embed\.', r'patch_embed1.'),
    (r'^stages\.(\d+)\.downsample\.', r'patch_embed{}.'),
    (r'^stages\.(\d+)\.blocks\.', r'block{}.'),
    (r'^stages\.(\d+)\.norm\.', r'norm{}.'),
    (r'\.mlp\.dwconv\.', r'.mlp.dwconv.dwconv.'),
)


def matches(keys: set[str]) -> bool:
    return {'patch_embed.proj.weight', 'stages.0.blocks.0.attn.q.weight', 'stages.0.blocks.0.attn.kv.weight'} <= keys


def convert(weights: Weights) -> Weights:
    official = {}
    for key, weight in weights.items():
        for pattern, name in _RENAMES:
            key = re.sub(pattern, lambda match: name.format(*(int(i) + 1 for i in match.groups())), key)  # noqa: B023
        official[key] = weight
    return to_native_pvt(official)


FORMAT = CheckpointFormat('timm_pvt_v2', matches, convert, note_norm_eps)
