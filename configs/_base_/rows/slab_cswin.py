# SLAB-CSWin: PRepBN, and simplified linear attention over whole maps in the first two stages.
row = dict(
    backbone=dict(
        norm_cfg=dict(_delete_=True, type='PRepBN'),
        attention=('sla', 'sla', 'softmax', 'softmax'),
        stripe_widths=(None, None, 7, None),
        drop_path_rate=0.1,
    )
)
