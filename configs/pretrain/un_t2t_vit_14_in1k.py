# T2T-ViT-14 with Unified Normalization. BN, MABN and PowerNorm: --cfg-options model.backbone.norm_cfg.type=TokenBN,
# MABN or PowerNorm.
_base_ = ['./t2t_vit_14_in1k.py']

model = dict(
    backbone=dict(_delete_=True, type='mmdet.ConvertedModel', model=_base_.model.backbone, norm_cfg=dict(type='UN'))
)
custom_hooks = [*_base_.custom_hooks, dict(type='RecalibrateFuseHook')]
