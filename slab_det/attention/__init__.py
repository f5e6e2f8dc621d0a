"""Attention in windows (Swin), over maps (PVT, ViT) and in stripes (CSWin).

A new attention subclasses :class:`WindowAttention` (for SLABSwin), :class:`MapAttention` (for SLABPVT and SLABViT) or
:class:`Attention` (for SLABCSwin) and writes ``mix(q, k, v, geometry)``, which training, deployment and export call.
Configs choose it by its name in ``WINDOW_ATTENTIONS``, ``MAP_ATTENTIONS`` or ``STRIPE_ATTENTIONS``.
"""

from slab_det.attention.base import (
    Attention,
    MapAttention,
    ShiftedWindowAttention,
    SoftmaxMapAttention,
    SoftmaxMixing,
    SoftmaxWindowAttention,
    WindowAttention,
)
from slab_det.attention.geometry import WindowGeometry, repeat_windows
from slab_det.attention.linear import (
    FocusedMapAttention,
    FocusedMixing,
    FocusedWindowAttention,
    SimplifiedMapAttention,
    SimplifiedMixing,
    SimplifiedWindowAttention,
)

WINDOW_ATTENTIONS: dict[str, type[WindowAttention]] = {
    'softmax': SoftmaxWindowAttention,
    'sla': SimplifiedWindowAttention,
    'focused': FocusedWindowAttention,
}
MAP_ATTENTIONS: dict[str, type[MapAttention]] = {
    'softmax': SoftmaxMapAttention,
    'sla': SimplifiedMapAttention,
    'focused': FocusedMapAttention,
}
STRIPE_ATTENTIONS: dict[str, type[Attention]] = {
    'softmax': SoftmaxMixing,
    'sla': SimplifiedMixing,
    'focused': FocusedMixing,
}
