# SLAB-CSWin: PRepBN, and simplified linear attention over whole maps in the first two stages.
_base_ = ['./prepbn_swin.py']

row = dict(
    backbone=dict(
        attention=('sla', 'sla', 'softmax', 'softmax'), stripe_widths=(None, None, 7, None), drop_path_rate=0.1
    )
)
