"""A deployed detector runs in every dtype and finds the same, or deploy refuses it with the reason."""

import copy

import pytest
import torch
from conftest import SMALL_SWIN, differing
from graph_cases import unmatched
from mmdet.structures import DetDataSample
from mmengine.config import Config
from zoo import ZOO, zoo_cfg

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.runtime.errors import DeploymentError

HALF = (torch.bfloat16, torch.float16)
COORDINATES = dict.fromkeys(HALF, '(level_embed|query_embedding.weight|roi_head.grid_head.*) may compute coordinates')
QUERIES = dict.fromkeys(HALF, r'does not run in torch.*same dtype.*; deploy it in float32')
REFUSED = {
    'GridRCNN': {None: r'does not run in its deployed form .*view.*; use the model as it is', **COORDINATES},
    'YOLOF': {torch.float16: 'does not run in torch.float16 .*without overflow.*; deploy it in float32'},
    'Mask2Former': QUERIES,
    'MaskFormer': QUERIES,
    **dict.fromkeys(('DeformableDETR', 'DINO', 'DDQDETR', 'GroundingDINO'), COORDINATES),
}


def cfg_of(name):
    if name in ZOO:
        cfg = zoo_cfg(name)
        if 'rcnn' in name:
            heads = cfg.roi_head.bbox_head
            for head in heads if isinstance(heads, list) else [heads]:
                # V3Det has 13,204 classes.
                head.num_classes = 20
                if 'num_classes' in head.loss_cls:
                    head.loss_cls.num_classes = 20
            if cfg.roi_head.get('mask_head'):
                cfg.roi_head.mask_head.num_classes = 20
            cfg.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
            cfg.test_cfg.rcnn.max_per_img = 10
        return cfg
    cfg = Config.fromstring(f"_base_ = ['mmdet::{name}.py']", '.py').model
    out_indices = (3,) if cfg.type == 'YOLOF' else (0, 1, 2, 3)
    cfg.backbone = {**SMALL_SWIN, 'norm_cfg': dict(type='LN'), 'out_indices': out_indices}
    cfg.neck.in_channels = 64 if cfg.type == 'YOLOF' else [8, 16, 32, 64]
    if 'rpn' in cfg.test_cfg:
        cfg.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
        cfg.test_cfg.rcnn.max_per_img = 10
        cfg.roi_head.bbox_head.fc_out_channels = 64
        cfg.roi_head.grid_head.num_convs = 1
    return cfg


def predict(model, size=(64, 128)):
    shape = dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0), img_id=0, img_path='')
    image = torch.randint(0, 256, (3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return model.test_step(dict(inputs=[image], data_samples=[DetDataSample(metainfo=shape)]))[0]


@pytest.mark.parametrize(
    'name', [*ZOO, 'grid_rcnn/grid-rcnn_r50_fpn_gn-head_2x_coco', 'yolof/yolof_r50-c5_8xb8-1x_coco']
)
@torch.no_grad()
def test_a_detector_is_deployed_and_finds_the_same_or_is_refused_with_the_reason(name):
    torch.manual_seed(0)
    model = build_detector(Config(dict(model=cfg_of(name))))
    if hasattr(model, 'level_embed'):
        # Without init_weights this parameter is uninitialised memory.
        torch.nn.init.normal_(model.level_embed)
    before = copy.deepcopy(model.state_dict())
    try:
        expected = predict(model)
    except Exception:
        # The detector needs text or frames, or the sizes in its small config do not match.
        expected = None
    for dtype in (None, *HALF):
        message = REFUSED.get(type(model).__name__, {}).get(dtype)
        if message is not None:
            with pytest.raises(DeploymentError, match=message):
                slab_det.deploy(model, dtype)
            continue
        deployed = slab_det.deploy(model, dtype)
        if expected is None:
            continue
        check, found = deployed.deployment_check, predict(deployed)
        # In half precision deploy compares the difference with what rounding explains.
        assert check.num_values > 400 and 0 < check.difference and (dtype or check.difference < 1e-4), (dtype, check)
        if dtype is None and 'pred_instances' in expected:
            found, wanted = found.pred_instances, expected.pred_instances
            assert len(wanted) and unmatched(found, wanted) <= 0.02, (len(found), len(wanted))
    assert not differing(model, before)
