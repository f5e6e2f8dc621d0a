# The released PVT-PRepBN configs: as adamw_1x, but norms and positions decay like everything else. Those of PVT with
# LayerNorm have PVT's AdamW 2e-4 and 1e-4; here all PVT rows train alike, so that they compare norms, not recipes.
_base_ = ['./adamw_1x.py']

optim_wrapper = dict(paramwise_cfg=None)
