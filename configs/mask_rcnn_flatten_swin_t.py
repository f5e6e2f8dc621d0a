# Flatten-Swin-T: LayerNorm, and focused linear attention in the first two stages, windows as in SLAB-Swin.
# It starts from Microsoft's Swin-T, whose softmax stages fit. The authors' own weights are linked in the README of
# github.com/LeapLabTHU/FLatten-Transformer, to be downloaded by hand; then give
# --cfg-options model.backbone.init_cfg.checkpoint=FILE.
_base_ = ['./mask_rcnn_swin_t.py']

model = dict(backbone=dict(attention=('focused', 'focused', 'softmax', 'softmax'), window_sizes=(56, 28, 7, 7)))
