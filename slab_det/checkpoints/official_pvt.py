"""The PVT authors' layout (github.com/whai362/PVT), V1 and V2, classification and detection.

Stages count from 1: ``patch_embed{i}.proj``, ``patch_embed{i}.norm``, ``pos_embed{i}`` (V1), ``norm{i}`` (V2) and
``block{i}.{j}.*`` with ``norm1``, ``attn.q``, ``attn.kv``, ``attn.proj``, ``attn.sr`` and ``attn.norm`` where the
stage reduces, ``norm2``, ``mlp.fc1``, ``mlp.dwconv.dwconv`` (V2), ``mlp.fc2``; linear attention (FLatten-PVT) adds
``attn.positional_encoding``, ``attn.dwc`` and ``attn.scale``. V1's classifiers end in ``cls_token``, whose position is
the first row of ``pos_embed4``, and ``norm``. SegFormer's backbones have the names of V2, and are one.

LayerNorm has eps 1e-6 in the blocks and 1e-5 in patch embeddings and reductions; mmdet's PVT has 1e-6 everywhere.
"""

from __future__ import annotations

from slab_det.checkpoints.pvt_layout import is_official_pvt, note_norm_eps, to_native_pvt
from slab_det.checkpoints.weight import CheckpointFormat

FORMAT = CheckpointFormat('official_pvt', is_official_pvt, to_native_pvt, note_norm_eps)
