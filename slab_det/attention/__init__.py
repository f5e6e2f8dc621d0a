"""Attention as mathematics over a geometry.

A new attention subclasses :class:`WindowAttention` (for SLABSwin) or :class:`MapAttention` (for SLABPVT and SLABViT)
and writes ``mix(q, k, v, geometry)``. Configs choose it by its word in ``WINDOW_ATTENTIONS`` or ``MAP_ATTENTIONS``. It
trains, fuses, deploys and exports as the attentions here do.
"""

from slab_det.attention.base import Attention, MapAttention, ShiftedWindowAttention, WindowAttention
from slab_det.attention.geometry import WindowGeometry, repeat_windows
from slab_det.attention.linear import (
    FocusedMapAttention,
    FocusedWindowAttention,
    SimplifiedMapAttention,
    SimplifiedWindowAttention,
)
from slab_det.attention.softmax import SoftmaxMapAttention, SoftmaxWindowAttention

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

__all__ = [
    'MAP_ATTENTIONS',
    'WINDOW_ATTENTIONS',
    'Attention',
    'MapAttention',
    'ShiftedWindowAttention',
    'WindowAttention',
    'WindowGeometry',
    'repeat_windows',
]
