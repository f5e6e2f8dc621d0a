# mmdet's defaults, with slab_det registered and every checkpoint checked.
_base_ = ['mmdet::_base_/default_runtime.py']

custom_imports = dict(imports=['slab_det'], allow_failed_imports=False)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3), checked_load=dict(type='CheckedLoadHook'))
