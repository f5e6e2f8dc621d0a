# The small Faster R-CNN: the small Mask R-CNN without its mask branch.
_base_ = ['./mask_rcnn_swin_small.py']

model = dict(type='FasterRCNN', roi_head=dict(mask_roi_extractor=None, mask_head=None))
