# tune_absorbed.py for a detector of which absorption kept some LayerNorms: as PRepBN they go in the first half of the
# run. What was absorbed stays affine.
_base_ = ['./tune_absorbed.py']

custom_hooks = [
    dict(type='ProgressiveNormHook', decay='linear', total=0.5, unit='fraction'),
    dict(type='RecalibrateFuseHook'),
]
