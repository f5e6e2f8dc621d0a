# tune_absorbed.py for a detector of which absorption kept some LayerNorms: as PRepBN they go in the first half of the
# run. What was absorbed stays affine. AP is lost: a PRepBN ends as one scale per channel, and absorption kept the norms
# that a whole matrix hardly follows. DSB2018, seed 0, mask AP: 0.223 (0.190 over 0.8 of the run), where a detector
# absorbed with --keep 0 reaches 0.320 by tune_absorbed.py; BCCD, seed 2, box AP: 0.475 and 0.504.
_base_ = ['./tune_absorbed.py']

custom_hooks = [
    dict(type='ProgressiveNormHook', decay='linear', total=0.5, unit='fraction'),
    dict(type='RecalibrateFuseHook'),
]
