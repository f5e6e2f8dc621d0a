# As adamw_1x, but norms and positions decay like everything else, as in the released PVT configs of SLAB. Those train
# PVT-T, with LayerNorm and with PRepBN, with AdamW at 1e-4 and weight decay 0.05 as here, but PVT-S, with both, at 2e-4
# and 1e-4. Here all sizes train alike. To follow the released PVT-S, give
# --cfg-options optim_wrapper.optimizer.lr=2e-4 optim_wrapper.optimizer.weight_decay=1e-4.
_base_ = ['./adamw_1x.py']

optim_wrapper = dict(paramwise_cfg=None)
