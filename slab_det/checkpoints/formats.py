"""The known layouts, and which of them a checkpoint has."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slab_det.checkpoints import microsoft_swin, native, official_pvt, slab_official, timm_pvt_v2, timm_swin
from slab_det.checkpoints.report import name_some
from slab_det.checkpoints.weight import CheckpointFormat
from slab_det.runtime.errors import CheckpointError

FORMATS: tuple[CheckpointFormat, ...] = (
    slab_official.FORMAT,
    official_pvt.FORMAT,
    timm_swin.FORMAT,
    timm_pvt_v2.FORMAT,
    microsoft_swin.FORMAT,
    native.FORMAT,
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
        return native.FORMAT
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
