"""A deployed detector runs in every dtype and finds the same, or deploy refuses it with the reason, as a table says."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import SMALL_SWIN, differing
from graph_cases import unmatched
from mmdet.structures import DetDataSample
from mmengine.config import Config
from zoo import ZOO, shrunk, zoo_cfg

import slab_det
from slab_det.backbones.adopt import replace_layers
from slab_det.checkpoints import build_detector
from slab_det.common.errors import DeploymentError
from slab_det.export import ExportError, build_graph
from slab_det.families import MaskFormer, Unsupported
from slab_det.families.deformable import deployed_deformable
from slab_det.inference.gpu.box_kernels import FixedOperators
from slab_det.inference.gpu.graph import make_family

HALF = (torch.bfloat16, torch.float16)
VIEW = r'does not run in .*view size.*; {}'
REFUSED = {
    'GridRCNN': {
        None: VIEW.format('use the model as it is'),
        **dict.fromkeys(HALF, VIEW.format('deploy it in float32')),
    },
    'YOLOF': {torch.float16: 'does not run in torch.float16 .*without overflow.*; deploy it in float32'},
}
# The configs behind the table of docs/deploy.md, and the names of their detectors there.
NAMES = {
    'faster_rcnn/faster-rcnn_r50_fpn_1x_coco': 'Faster R-CNN',
    'swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco': 'Mask R-CNN',
    'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco': 'Cascade R-CNN',
    'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco': 'Cascade Mask R-CNN',
    'v3det/cascade_rcnn_swinb_fpn_8x4_sample1e-3_mstrain_v3det_2x': 'Cascade R-CNN of V3Det',
    'grid_rcnn/grid-rcnn_r50_fpn_gn-head_2x_coco': 'Grid R-CNN',
    'swin/retinanet_swin-t-p4-w7_fpn_1x_coco': 'RetinaNet',
    'dyhead/atss_swin-l-p4-w12_fpn_dyhead_ms-2x_coco': 'ATSS',
    'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco': 'FCOS',
    'rtmdet/rtmdet_l_swin_b_4xb32-100e_coco': 'RTMDet',
    'rtmdet/rtmdet-ins_s_8xb32-300e_coco': 'RTMDet-Ins',
    'yolof/yolof_r50-c5_8xb8-1x_coco': 'YOLOF',
    'v3det/deformable-detr-refine-twostage_swin_16xb2_sample1e-3_v3det_50e': 'Deformable DETR',
    'dino/dino-5scale_swin-l_8xb2-12e_coco': 'DINO',
    'ddq/ddq-detr-4scale_swinl_8xb2-30e_coco': 'DDQ DETR',
    'mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco': 'Mask2Former',
    'maskformer/maskformer_swin-l-p4-w12_64xb1-ms-300e_coco': 'MaskFormer',
}
# Parts that may run in half precision alone.
PARTS = dict(backbone='backbone', neck='neck', encoder='encoder') | {'pixel decoder': 'panoptic_head.pixel_decoder'}
PAGE = (Path(__file__).parents[2] / 'docs' / 'deploy.md').read_text()


def cfg_of(name):
    if name in ZOO:
        cfg = zoo_cfg(name)
    else:
        cfg = Config.fromstring(f"_base_ = ['mmdet::{name}.py']", '.py').model
        cfg = Config(dict(model=shrunk(cfg.to_dict(), {}))).model
        stages = {'YOLOF': (3,), 'RTMDet': (1, 2, 3)}.get(cfg.type, (0, 1, 2, 3))
        cfg.backbone = {**SMALL_SWIN, 'norm_cfg': dict(type='LN'), 'out_indices': stages}
        channels = [8 * 2**stage for stage in stages]
        cfg.neck.in_channels = channels[0] if cfg.type == 'YOLOF' else channels
    if 'encoder' in cfg:
        cfg.bbox_head.embed_dims = 32
    if cfg.get('bbox_head', {}).get('type') == 'FCOSHead':
        cfg.bbox_head.norm_cfg = dict(type='GN', num_groups=4)
    if 'roi_head' in cfg:
        heads = cfg.roi_head.bbox_head
        for head in heads if isinstance(heads, list) else [heads]:
            # V3Det has 13,204 classes.
            head.num_classes = 20
            if 'num_classes' in head.get('loss_cls', {}):
                head.loss_cls.num_classes = 20
        if cfg.roi_head.get('mask_head'):
            cfg.roi_head.mask_head.num_classes = 20
        if 'grid_head' in cfg.roi_head:
            cfg.roi_head.grid_head.num_convs = 1
        cfg.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
        cfg.test_cfg.rcnn.max_per_img = 10
    return cfg


def lowered_parts(model, dtype):
    """The words for those parts of a detector whose weights all have this dtype."""
    modules = dict(model.named_modules())
    parts = {word: modules[path].parameters() for word, path in PARTS.items() if path in modules}
    return [word for word, parameters in parts.items() if {x.dtype for x in parameters} == {dtype}]


def table_row(name, model, deployed):
    """The row of a detector in the table of docs/deploy.md, by what deploy and export do with it.

    Args:
        name: The name in the table.
        model: The detector.
        deployed: Its deployed form in each dtype.
    """
    if not deployed:
        return f'| {name} | not deployed | | |'
    static = copy.deepcopy(model)
    replace_layers(static, deployed_deformable)
    try:
        family = make_family(static, FixedOperators())
        graph = 'all but the fusion of masks' if isinstance(family, MaskFormer) else 'the whole detector'
    except Unsupported:
        graph = 'backbone and neck' if model.with_neck else 'backbone'
    try:
        build_graph(model)
        file = 'the whole detector'
    except ExportError:
        build_graph(model, 'backbone')
        file = 'backbone'
    half = [dtype for dtype in HALF if dtype in deployed]
    dtypes = ', '.join(str(dtype).partition('.')[2] for dtype in half)
    if any(parameter.dtype not in half for dtype in half for parameter in deployed[dtype].parameters()):
        *parts, last = lowered_parts(deployed[half[0]], half[0])
        dtypes += f' of {", ".join(parts)} and {last}'
    return f'| {name} | {graph} | {dtypes} | {file} |'


def predict(model, size=(64, 128)):
    shape = dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0), img_id=0, img_path='')
    image = torch.randint(0, 256, (3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return model.test_step(dict(inputs=[image], data_samples=[DetDataSample(metainfo=shape)]))[0]


@pytest.mark.parametrize('name', dict.fromkeys((*ZOO, *NAMES)))
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
    refused, forms = REFUSED.get(type(model).__name__, {}), {}
    for dtype in (None, *HALF):
        message = refused.get(dtype)
        if message is not None:
            with pytest.raises(DeploymentError, match=message):
                slab_det.deploy(model, dtype)
            continue
        deployed = forms[dtype] = slab_det.deploy(model, dtype)
        if expected is None:
            continue
        check, found = deployed.deployment_check, predict(deployed)
        # In half precision deploy compares the difference with what rounding explains.
        assert check.num_values > 400 and 0 < check.difference and (dtype or check.difference < 1e-4), (dtype, check)
        if dtype is None and 'pred_instances' in expected:
            found, wanted = found.pred_instances, expected.pred_instances
            assert len(wanted) and unmatched(found, wanted) <= 0.02, (len(found), len(wanted))
    assert not differing(model, before)
    if name in NAMES:
        row = table_row(NAMES[name], model, forms)
        assert row in PAGE, f'docs/deploy.md lacks the row {row}'
