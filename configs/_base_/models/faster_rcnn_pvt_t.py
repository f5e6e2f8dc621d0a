# Faster R-CNN with FPN on PVT-T: Mask R-CNN without its mask branch.
_base_ = ['./mask_rcnn_pvt_t.py']

model = dict(type='FasterRCNN', roi_head=dict(mask_roi_extractor=None, mask_head=None))
