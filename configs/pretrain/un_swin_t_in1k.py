# Swin-T with Unified Normalization. BN, MABN and PowerNorm: --cfg-options model.backbone.norm_cfg.type=TokenBN, MABN or
# PowerNorm.
_base_ = ['./swin_t_in1k.py']

model = dict(backbone=dict(norm_cfg=dict(type='UN')))
custom_hooks = [dict(type='RecalibrateFuseHook')]
