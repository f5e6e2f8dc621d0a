# SLAB-PVT: PRepBN, and simplified linear attention over whole maps in all stages.
_base_ = ['./prepbn_pvt.py']

row = dict(backbone=dict(attention='sla', la_sr_ratios=(1, 1, 1, 1)))
