# SLAB-Swin: PRepBN, and simplified linear attention in the first two stages.
_base_ = ['./prepbn_swin.py']

row = dict(backbone=dict(attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(56, 28, 7, 7)))
