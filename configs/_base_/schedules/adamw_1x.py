# 12 epochs at batch 16, as in Table 3 of SLAB: AdamW, steps at 8 and 11, 500 warm-up iterations.
_base_ = ['mmdet::_base_/schedules/schedule_1x.py']

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        custom_keys={
            'absolute_pos_embed': dict(decay_mult=0.0),
            'relative_position_bias_table': dict(decay_mult=0.0),
            'norm': dict(decay_mult=0.0),
            # The norms after the stages of PVT and PVTv2 have no name but their place.
            'backbone.layers.0.2.': dict(decay_mult=0.0),
            'backbone.layers.1.2.': dict(decay_mult=0.0),
            'backbone.layers.2.2.': dict(decay_mult=0.0),
            'backbone.layers.3.2.': dict(decay_mult=0.0),
            # PRepBN of any other name, where slab_det.convert_norms made it.
            '.repbn.': dict(decay_mult=0.0),
            '.ln.': dict(decay_mult=0.0),
        }
    ),
)
