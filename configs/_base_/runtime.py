# mmdet's defaults, with slab_det registered, every checkpoint checked, an error where the loss is NaN or infinite, and
# after --resume the random numbers and gradients of the uninterrupted run.
_base_ = ['mmdet::_base_/default_runtime.py']

custom_imports = dict(imports=['slab_det'], allow_failed_imports=False)
default_hooks = dict(
    checkpoint=dict(max_keep_ckpts=3),
    checked_load=dict(type='CheckedLoadHook'),
    exact_resume=dict(type='ExactResumeHook'),
    norm_state=dict(type='NormStateHook'),
    finite_loss=dict(type='FiniteLossHook'),
)
