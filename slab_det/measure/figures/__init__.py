"""Pictures of what was measured, readable when printed in black and white."""

from slab_det.measure.figures.ap_latency import draw_ap_latency
from slab_det.measure.figures.attention_rank import draw_attention_rank

__all__ = ['draw_ap_latency', 'draw_attention_rank']
