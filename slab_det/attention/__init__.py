"""Attention as mathematics over a geometry.

A new attention subclasses :class:`WindowAttention` (for SLABSwin) or :class:`MapAttention` (for SLABPVT) and writes
``mix(q, k, v, geometry)``. Configs choose it by its word in ``WINDOW_ATTENTIONS`` or ``MAP_ATTENTIONS``. It trains,
fuses, deploys and exports as the attentions here do.
"""

from slab_det.attention.base import Attention
from slab_det.attention.geometry import (
    Geometry,
    MapGeometry,
    WindowGeometry,
    Windows,
    repeat_windows,
    resize_table,
    window_geometry,
)
from slab_det.attention.linear import (
    FocusedMapAttention,
    FocusedWindowAttention,
    LinearMixing,
    SimplifiedMapAttention,
    SimplifiedWindowAttention,
)
from slab_det.attention.softmax import SoftmaxMapAttention, SoftmaxWindowAttention
from slab_det.attention.spatial_reduction import MapAttention
from slab_det.attention.windows import ShiftedWindowAttention, WindowAttention

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
    'FocusedMapAttention',
    'FocusedWindowAttention',
    'Geometry',
    'LinearMixing',
    'MapAttention',
    'MapGeometry',
    'ShiftedWindowAttention',
    'SimplifiedMapAttention',
    'SimplifiedWindowAttention',
    'SoftmaxMapAttention',
    'SoftmaxWindowAttention',
    'WindowAttention',
    'WindowGeometry',
    'Windows',
    'repeat_windows',
    'resize_table',
    'window_geometry',
]
