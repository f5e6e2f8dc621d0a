# SLAB-CSWin-S.
_base_ = ['./slab_cswin_t_in1k.py']

model = dict(backbone=dict(depths=(2, 4, 32, 2), drop_path_rate=0.3))
