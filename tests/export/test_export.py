"""The export graph equals mmdet, the ONNX file equals the graph, and int8 differs by rounding."""

import copy
import json
import re
from functools import cache

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from conftest import FOUR_STAGE_PVT, SLA, as_trained, differing, find_objects, on_a_full_disk
from mmdet.models.roi_heads import MaskScoringRoIHead
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi

from slab_det.export import (
    ExportedDetector,
    ExportError,
    build_graph,
    check_parity,
    export_onnx,
    load_runtime,
    quantize_onnx,
    random_images,
)
from slab_det.export.settings import follow_config
from slab_det.fusion.channels import find_channels, resize_channels

PVT = dict(FOUR_STAGE_PVT, num_layers=(1, 1, 1, 1))
BACKBONES = {
    'Swin': {},
    'SLAB-Swin': SLA,
    'Flatten-Swin': dict(attention='focused', norm_cfg=dict(type='LN'), use_abs_pos_embed=True),
    'stock Swin': dict(type='SwinTransformer'),
    'PVT': PVT,
    'SLAB-PVT': dict(PVT, attention=('sla', 'focused', 'sla', 'sla'), la_sr_ratios=(2, 1, 1, 1)),
    'SLAB-CSwin': dict(
        type='SLABCSwin',
        num_heads=(1, 2, 2, 4),
        pretrain_img_size=64,
        # After two linear stages over the whole map, a random net has nearly the same values everywhere.
        attention=('sla', 'focused', 'softmax', 'softmax'),
        stripe_widths=(None, 3, 3, None),
        depths=(1, 1, 1, 1),
    ),
}
SIZES = [(64, 96), (131, 75), (101, 160)]


@pytest.fixture(scope='module')
def detector(small_detector_cfg):
    """A function that builds a small random detector, which finds objects in noise; a pruned one has half as many
    hidden channels everywhere."""

    def build(row='Swin', kind='mask_rcnn', divisor=32, agnostic=False):
        pruned, row = row.startswith('pruned '), row.removeprefix('pruned ')
        if 'PVT' in row:
            cfg = small_detector_cfg(kind)
            cfg.backbone, cfg.neck.in_channels = BACKBONES[row], [8, 16, 24, 32]
        else:
            # One block is shifted; a file of more blocks has nothing that these have not.
            cfg = small_detector_cfg(kind, **{'depths': (2, 1, 1, 1), **BACKBONES[row]})
        cfg.data_preprocessor.pad_size_divisor = divisor
        if agnostic:
            cfg.roi_head.bbox_head.reg_class_agnostic = cfg.roi_head.mask_head.class_agnostic = True
        cfg.test_cfg.rpn.update(nms_pre=60, max_per_img=40)
        for extractor in filter(None, (cfg.roi_head.bbox_roi_extractor, cfg.roi_head.mask_roi_extractor)):
            extractor.finest_scale = 8  # small images have small boxes, which should still lie on several levels
        model = as_trained(MODELS.build(cfg))
        if pruned:
            places = find_channels(model).values()
            assert {place.heads for place in places} > {1}
            resize_channels(model, {place.name: place.count // 2 for place in places})
        return find_objects(model)

    return build


@pytest.fixture(scope='module')
def exported(detector, tmp_path_factory):
    """A function that returns a small detector and its file, which is written once for each set of arguments."""

    @cache
    def export(scope='detector', score_thr=0.05, **options):
        model, file = detector(), tmp_path_factory.mktemp('exported') / 'model.onnx'
        model.roi_head.test_cfg.score_thr = score_thr
        before, unflatten = copy.deepcopy(model.state_dict()), torch.Tensor.unflatten
        export_onnx(model, file, scope, **options)
        assert torch.Tensor.unflatten is unflatten
        assert not differing(model, before)
        return model, file

    return export


def predict(model, image, divisor):
    """What mmdet finds in raw pixels, normalised and padded here: its preprocessor knows float32 only."""
    mean, std = ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    image = (image.flip(1) - image.new_tensor(mean)[:, None, None]) / image.new_tensor(std)[:, None, None]
    height, width = image.shape[2:]
    padded = image.new_zeros(1, 3, -(-height // divisor) * divisor, -(-width // divisor) * divisor)
    padded[:, :, :height, :width] = image
    sample = DetDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1.0, 1.0)))
    features = model.extract_feat(padded)
    proposals = model.rpn_head.predict(features, [sample], rescale=False)
    head = model.roi_head
    found = head.predict_bbox(features, [sample.metainfo], proposals, head.test_cfg)[0]
    logits = head._mask_forward(features, bbox2roi([found.bboxes]))['mask_preds']
    return found, logits[range(len(found)), 0 if head.mask_head.class_agnostic else found.labels]


@pytest.mark.parametrize(('row', 'agnostic'), [*((row, False) for row in BACKBONES), ('Swin', True)])
@torch.no_grad()
def test_graph_finds_what_mmdet_finds(detector, row, agnostic):
    divisor = 1 if row in ('Swin', 'SLAB-Swin', 'PVT', 'SLAB-CSwin') else 32
    model = detector(row, divisor=divisor, agnostic=agnostic).double()
    graph = build_graph(model).double()
    for size in SIZES:
        image = torch.rand(1, 3, *size, dtype=torch.float64) * 255
        expected, expected_logits = predict(model, image, divisor)
        boxes, scores, labels, logits = graph(image)
        assert len(expected) > 5, size
        torch.testing.assert_close(scores, expected.scores, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(boxes, expected.bboxes, rtol=1e-7, atol=1e-6)
        assert labels.equal(expected.labels), size
        torch.testing.assert_close(logits, expected_logits, rtol=1e-6, atol=1e-7)


def test_negative_max_per_img_keeps_all_detections(detector, tmp_path):
    model = detector()
    model.roi_head.test_cfg.update(max_per_img=-1, score_thr=0.0)
    model.rpn_head.test_cfg.max_per_img = 60
    export_onnx(model, tmp_path / 'model.onnx')
    image = torch.rand(1, 3, 96, 128) * 255
    with torch.no_grad():
        expected, _ = predict(model, image, 32)
    boxes = load_runtime(tmp_path / 'model.onnx').run(image.numpy())['boxes']
    assert len(boxes) == len(expected) > 100


def num_detections(check):
    return int(re.search(r'(\d+) detections', check.what)[1])


@pytest.mark.parametrize(
    ('row', 'kind', 'scope', 'divisor', 'agnostic'),
    [
        ('PVT', 'mask_rcnn', 'detector', 32, True),
        ('pruned PVT', 'faster_rcnn', 'detector', 1, False),
        *((row, 'faster_rcnn', 'backbone', 32, False) for row in BACKBONES if row != 'stock Swin'),
        ('pruned Swin', 'faster_rcnn', 'backbone', 1, False),
    ],
)
def test_file_computes_what_the_detector_does_at_every_size(detector, tmp_path, row, kind, scope, divisor, agnostic):
    model = detector(row, kind, divisor, agnostic)
    export_onnx(model, tmp_path / 'model.onnx', scope)
    operators = {node.op_type for node in onnx.load(tmp_path / 'model.onnx').graph.node}
    assert not operators & {'LayerNormalization', 'BatchNormalization', 'ReduceMean'} or row == 'Flatten-Swin'
    assert 'Dropout' not in operators
    sizes, runtime = SIZES[1:], load_runtime(tmp_path / 'model.onnx', threads=1)
    checks = check_parity(model, runtime, random_images(sizes))
    assert all(check.what.startswith(f'{height}x{width}') for check, (height, width) in zip(checks, sizes, strict=True))
    if scope == 'detector':
        assert min(map(num_detections, checks)) > 5, checks
        return
    pytest.importorskip('openvino')
    other, image = load_runtime(tmp_path / 'model.onnx', 'openvino', threads=1), random_images([(131, 100)])[0]
    expected, found = (one.run(image) for one in (runtime, other))
    # OpenVINO gives a reshape that is an output of PVT's file the name of the operator.
    assert [*found] == [*expected] == ['feature0', 'feature1', 'feature2', 'feature3']
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-4 * np.abs(value).max(), name


def test_dimensions_have_names(exported):
    found, features = (
        {
            value.name: [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.output)
        }
        for graph in (onnx.load(exported(scope)[1]).graph for scope in ('detector', 'backbone'))
    )
    assert found['image'] == features['image'] == [1, 3, 'height', 'width']
    assert found['boxes'] == ['detections', 4] and found['mask_logits'] == ['detections', 28, 28]
    assert found['scores'] == found['labels'] == ['detections']
    assert features['feature2'] == ['batch', 32, 'height2', 'width2']


@pytest.mark.parametrize('opset', [16, 20])
def test_other_opsets_compute_the_same(opset, exported):
    model, file = exported(opset=opset)
    assert [entry.version for entry in onnx.load(file).opset_import if not entry.domain] == [opset]
    (check,) = check_parity(model, load_runtime(file, threads=1), random_images(SIZES[:1]))
    assert check.conclusive and check.same


@pytest.mark.parametrize('row', ['Swin', 'Flatten-Swin'])
def test_a_float16_file_differs_by_what_rounding_explains(detector, exported, tmp_path, row):
    if row == 'Swin':
        model, file = exported(dtype=torch.float16)
    else:
        model, file = detector(row), tmp_path / 'half.onnx'
        # The first LayerNorm reads values whose squares float16 cannot hold.
        model.backbone.patch_embed.projection.weight.data.mul_(1000)
        export_onnx(model, file, dtype=torch.float16)
    checks = check_parity(model, load_runtime(file, threads=1), random_images(SIZES[1:]))
    assert any(check.conclusive for check in checks) and all(check.same for check in checks if check.conclusive), checks
    assert max(check.rounding for check in checks) > 1e-4, checks
    content = onnx.shape_inference.infer_shapes(onnx.load(file))
    weights = {tensor.name: tensor.data_type for tensor in content.graph.initializer}
    # Linear attention adds the encodings of positions in float32.
    left = [name for name, kind in weights.items() if kind == onnx.TensorProto.FLOAT and '::Add_' not in name]
    assert left == ['score_thr'] and len(weights) > 50
    kinds = weights | {
        value.name: value.type.tensor_type.elem_type
        for value in (*content.graph.input, *content.graph.value_info, *content.graph.output)
    }
    found = {
        name: {kinds[node.input[0]] for node in content.graph.node if node.op_type == name}
        for name in ('Conv', 'Gemm', 'Erf', 'RoiAlign', 'NonMaxSuppression', 'TopK')
    }
    half, single = {onnx.TensorProto.FLOAT16}, {onnx.TensorProto.FLOAT}
    layers, boxes = dict.fromkeys(('Conv', 'Gemm', 'Erf'), half), ('RoiAlign', 'NonMaxSuppression', 'TopK')
    assert found == layers | dict.fromkeys(boxes, single)
    assert {value.type.tensor_type.elem_type for value in content.graph.output[:2]} == single
    assert kinds['image'] == onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    'layer', ['rpn_head.rpn_conv', 'roi_head.mask_head.conv_logits', 'backbone.patch_embed.projection']
)
def test_parity_check_refuses_a_wrong_float16_file(exported, layer):
    model, file = exported(dtype=torch.float16)
    other = copy.deepcopy(model)
    other.get_submodule(layer).weight.data *= 0.9
    with pytest.raises(ExportError, match=r'131x75.* in \d+,\d+ values'):
        check_parity(other, load_runtime(file, threads=1), random_images(SIZES[1:2]))


def test_a_float16_file_is_half_as_large_and_is_not_quantized(exported, tmp_path):
    (_, single), (_, half) = exported(), exported(dtype=torch.float16)
    weights = [sum(len(tensor.raw_data) for tensor in onnx.load(file).graph.initializer) for file in (single, half)]
    assert 0.49 < weights[1] / weights[0] < 0.51
    assert load_runtime(half).precision == 'float16' and load_runtime(single).precision == 'float32'
    with pytest.raises(ExportError, match='is in float16: quantize the float32 file'):
        quantize_onnx(half, tmp_path / 'int8.onnx', random_images(SIZES[:1]))


def test_only_an_exported_file_is_quantized_and_only_on_images(exported, tmp_path):
    file, other = exported()[1], tmp_path / 'other.onnx'
    with pytest.raises(ExportError, match='no calibration image'):
        quantize_onnx(file, tmp_path / 'int8.onnx', [])
    model = onnx.load(file)
    (entry,) = (entry for entry in model.metadata_props if entry.key == 'slab_det')
    entry.value = json.dumps(json.loads(entry.value) | dict(int8_weight_bits=8))
    onnx.save(model, other)
    with pytest.raises(ExportError, match='is in int8: quantize the float32 file'):
        quantize_onnx(other, tmp_path / 'int8.onnx', random_images(SIZES[:1]))
    entry.value = json.dumps({key: value for key, value in json.loads(entry.value).items() if key != 'precision'})
    onnx.save(model, other)
    with pytest.raises(ExportError, match='by slab-det export of an earlier version: export it again'):
        load_runtime(other)
    entry.key = 'another'
    onnx.save(model, other)
    with pytest.raises(ExportError, match='was not written by slab-det export'):
        quantize_onnx(other, tmp_path / 'int8.onnx', random_images(SIZES[:1]))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(opset=15), 'opset=15: give 16 to 20'),
        (dict(opset=21), 'opset=21: give 16 to 20'),
        (dict(dtype=torch.float16, opset=16), 'opset=16 has no LayerNormalization, .*: give 17 or more'),
        (dict(dtype=torch.bfloat16), 'dtype=torch.bfloat16: give one of float32, float16'),
    ],
)
def test_an_opset_or_a_dtype_that_a_file_cannot_have_is_refused(detector, tmp_path, options, message):
    with pytest.raises(ExportError, match=message):
        export_onnx(detector(), tmp_path / 'model.onnx', **options)


def test_detector_that_finds_nothing_returns_empty_outputs(exported):
    outputs = load_runtime(exported(score_thr=0.995)[1]).run(random_images(SIZES[:1])[0])
    assert {name: value.shape for name, value in outputs.items()} == {
        'boxes': (0, 4),
        'scores': (0,),
        'labels': (0,),
        'mask_logits': (0, 28, 28),
    }


def test_file_takes_a_lower_score_threshold_and_fewer_detections(exported, small_detector_cfg):
    file, cfg = exported(score_thr=0.995)[1], small_detector_cfg()
    cfg.test_cfg.rpn.update(nms_pre=60, max_per_img=40)
    cfg.test_cfg.rcnn.max_per_img = 7
    image, sample = torch.from_numpy(random_images(SIZES[:1])[0][0]), DetDataSample()
    sample.set_metainfo(dict(ori_shape=image.shape[1:], img_shape=image.shape[1:], scale_factor=(1.0, 1.0)))
    found = ExportedDetector(str(file), detector=cfg)([image], [sample])[0].pred_instances
    every = load_runtime(file).with_threshold(cfg.test_cfg.rcnn.score_thr).run(image[None].numpy())
    assert len(every['scores']) > len(found) == 7 and found.scores.numpy().tolist() == every['scores'][:7].tolist()


def test_a_file_names_its_family_of_heads(exported, small_detector_cfg):
    metadata, cfg = load_runtime(exported()[1]).metadata, small_detector_cfg()
    cfg.test_cfg.rpn.update(nms_pre=60, max_per_img=40)
    assert metadata['family'] == 'two_stage' and follow_config('model.onnx', metadata, cfg)
    metadata['family'] = 'later'
    with pytest.raises(ExportError, match="model.onnx .*'later', .* update"):
        follow_config('model.onnx', metadata, cfg)


@pytest.mark.parametrize('score_thr', [0.05, 0.995])
def test_parity_check_compares_heads_even_if_nothing_is_detected(exported, score_thr):
    model, file = exported(score_thr=score_thr)
    (check,) = check_parity(model, load_runtime(file, threads=1), random_images(SIZES[:1]))
    assert check.num_values > 10_000 and bool(num_detections(check)) == (score_thr < 0.5)


@pytest.mark.parametrize(
    ('layer', 'score_thr'),
    [
        ('rpn_head.rpn_cls', 0.995),
        ('rpn_head.rpn_reg', 0.995),
        ('roi_head.bbox_head.fc_cls', 0.995),
        ('roi_head.bbox_head.fc_reg', 0.995),
        ('roi_head.mask_head.conv_logits', 0.995),
        ('backbone.stages.3.blocks.0.ffn.layers.1', 0.05),
    ],
)
def test_parity_check_detects_24_halved_weights(exported, layer, score_thr):
    model, file = exported(score_thr=score_thr)
    other = copy.deepcopy(model)
    other.get_submodule(layer).weight.data.view(-1)[:24] /= 2
    with pytest.raises(ExportError, match=r'64x96.* in \d+,\d+ values'):
        check_parity(other, load_runtime(file, threads=1), random_images(SIZES[:1]))


@pytest.mark.parametrize(
    'change',
    [
        lambda model: model.rpn_head.test_cfg.nms.update(iou_threshold=0.3),
        lambda model: model.roi_head.test_cfg.nms.update(iou_threshold=0.3),
        lambda model: model.roi_head.test_cfg.update(score_thr=0.3),
    ],
    ids=['NMS of proposals', 'NMS of detections', 'score'],
)
def test_parity_check_refuses_a_file_of_other_thresholds(exported, change):
    model, file = exported()
    other = copy.deepcopy(model)
    change(other)
    with pytest.raises(ExportError, match=r'\([1-9][\d.]*% unmatched'):
        check_parity(other, load_runtime(file, threads=1), random_images(SIZES[:1]))


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_weights_that_are_not_finite_are_refused(exported, detector, tmp_path, value):
    model = detector()
    model.roi_head.mask_head.conv_logits.weight.data[0, 0] = value
    message = r'1 of \d+ tensors hold NaN or infinite values \(roi_head.mask_head.conv_logits.weight\)'
    with pytest.raises(ExportError, match=message):
        export_onnx(model, tmp_path / 'model.onnx')
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ExportError, match=message):
        check_parity(model, load_runtime(exported()[1], threads=1), random_images(SIZES[:1]))


def test_images_with_large_rounding_in_pytorch_are_inconclusive(detector, tmp_path):
    model = detector(kind='faster_rcnn')
    # In float32 1e6 + x - 1e6 loses most digits of x.
    model.rpn_head.rpn_conv.bias.data += 1e6
    model.rpn_head.rpn_cls.weight.data -= model.rpn_head.rpn_cls.weight.data.mean(1, keepdim=True)
    export_onnx(model, tmp_path / 'model.onnx')
    with pytest.raises(ExportError, match='none of 1 images .* --check-images'):
        check_parity(model, load_runtime(tmp_path / 'model.onnx', threads=1), random_images(SIZES[:1]))


def test_full_disk_leaves_the_previous_file(exported, tmp_path):
    model, path = exported('backbone')[0], tmp_path / 'model.onnx'
    path.write_text('before')
    message = on_a_full_disk(lambda: export_onnx(model, path, 'backbone'))
    assert str(path) in message and 'resume' not in message, message
    assert path.read_text() == 'before' and len([*tmp_path.iterdir()]) == 1


def test_truncated_file_is_refused(exported, tmp_path):
    path = tmp_path / 'model.onnx'
    path.write_bytes(exported()[1].read_bytes()[:-1000])
    with pytest.raises(ExportError, match='model.onnx .* cut off .*: export it again'):
        load_runtime(path)


def test_unsupported_part_of_a_detector_is_named(detector, tmp_path):
    model = detector()

    def refuses(message, **options):
        with pytest.raises(ExportError, match=message):
            export_onnx(model, tmp_path / 'model.onnx', **options)

    refuses("scope 'neck' is not one of", scope='neck')
    model.deployed = True
    refuses('the model is deployed')
    model.deployed = False
    model.roi_head.bbox_roi_extractor.roi_layers[0] = torch.nn.Identity()
    refuses("roi_layers of pool_mode='avg'")
    model.roi_head.bbox_head.bbox_coder.add_ctr_clamp = True
    refuses('bbox_coders without add_ctr_clamp')
    model.roi_head.test_cfg.nms.type = 'soft_nms'
    refuses('plain NMS per class in the test_cfg of the bbox_head')
    kind = type(model.roi_head.bbox_head)
    model.roi_head.bbox_head.__class__ = type('OtherHead', (kind,), dict(predict_by_feat=lambda self: None))
    refuses('needs BBoxHead as bbox_head, not OtherHead')
    model.roi_head.__class__ = MaskScoringRoIHead
    refuses('needs StandardRoIHead as roi_head, not MaskScoringRoIHead')
    model.rpn_head = torch.nn.Identity()
    refuses('needs RPNHead as rpn_head, not Identity')
    del model.rpn_head
    refuses('needs RPNHead as rpn_head, not NoneType')


def test_neck_without_export_form_raises_one_line(small_detector_cfg, tmp_path):
    cfg = small_detector_cfg()
    # The neck of Libra R-CNN.
    refine = dict(type='BFP', in_channels=cfg.neck.out_channels, num_levels=5, refine_level=2, refine_type='non_local')
    cfg.neck = [cfg.neck, refine]
    with pytest.raises(ExportError, match=r'this MaskRCNN has no export form: [^\n]*adaptive pooling[^\n]*$'):
        export_onnx(as_trained(MODELS.build(cfg)), tmp_path / 'model.onnx')


def test_attention_with_hooks_has_no_export_form(small_detector):
    model = small_detector(type='SwinTransformer', norm_cfg=dict(type='LN'))
    attention = model.backbone.stages[0].blocks[0].attn
    attention.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ExportError, match='blocks.0.attn has hooks.*remove them'):
        build_graph(model)


def test_file_of_another_program_is_refused(tmp_path):
    model = '<ir_version: 8, opset_import: ["": 17]> other (float[1] x) => (float[1] x) {}'
    onnx.save(onnx.parser.parse_model(model), tmp_path / 'other.onnx')
    with pytest.raises(ExportError, match='was not written by slab-det export'):
        load_runtime(tmp_path / 'other.onnx')
    with pytest.raises(ExportError, match='there is no file'):
        load_runtime(tmp_path / 'nothing.onnx')
    with pytest.raises(ExportError, match="runtime 'tensorrt' is not one of"):
        load_runtime(tmp_path / 'other.onnx', 'tensorrt')
    # The spelling of earlier versions.
    with pytest.raises(ExportError, match="'bf16' is not one of float32, bfloat16, which openvino computes"):
        load_runtime(tmp_path / 'other.onnx', 'openvino', precision='bf16')
    with pytest.raises(ExportError, match="'bfloat16' is not one of float32"):
        load_runtime(tmp_path / 'other.onnx', precision='bfloat16')


def test_linear_layers_of_tokens_need_no_gather(exported):
    graph = onnx.load(exported('backbone')[1]).graph
    # Each x[0] would be a Gather.
    gathers = [node.name for node in graph.node if node.op_type == 'Gather']
    assert not [name for name in gathers if re.search('qkv|proj|ffn|reduction', name)]


def test_layers_with_weights_run_in_int8_and_output_layers_in_float32(exported, tmp_path):
    # From opset 18 on axes are inputs; test_int8_differs_by_rounding has an earlier one.
    source, target = exported(opset=20)[1], tmp_path / 'int8.onnx'
    nodes = quantize_onnx(source, target, random_images([(64, 96), (75, 66)]))
    graph = onnx.load(target).graph
    scales = {tensor.name: tensor.dims for tensor in graph.initializer if tensor.name.endswith('scale')}
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    # The scales of the int8 weights, by the name of the dequantized weight.
    weights = {
        node.output[0]: scales[node.input[1]]
        for node in graph.node
        if node.op_type == 'DequantizeLinear' and types.get(node.input[0]) == onnx.TensorProto.INT8
    }
    quantized = {node.name: weights[node.input[1]] for node in graph.node if {*node.input[1:2]} & weights.keys()}
    assert set(quantized) == set(nodes) and all(scale for scale in quantized.values()), 'a scale per channel'
    to_quantizers = {node.input[0] for node in graph.node if node.op_type == 'QuantizeLinear'}
    assert not [node.name for node in graph.node if node.op_type == 'Gemm' and node.output[0] in to_quantizers]
    names = ' '.join(nodes)
    for part in ('qkv', 'proj/', 'ffn', 'downsample', 'lateral_convs', 'fpn_convs', 'rpn_conv'):
        assert part in names, part
    for part in ('projection', 'rpn_cls', 'rpn_reg'):
        assert part not in names, part
    runtime, image = load_runtime(target, threads=1), random_images([(96, 128)])[0]
    # The threshold is still an input of the graph that a runtime can set.
    assert len(runtime.with_threshold(0.0).run(image)['scores']) > len(runtime.run(image)['scores'])


def test_int8_differs_by_rounding(exported, tmp_path):
    source, target = exported('backbone')[1], tmp_path / 'int8.onnx'
    quantize_onnx(source, target, random_images([(96, 128), (75, 131)]))
    exact, rounded = (load_runtime(path, threads=1).run(random_images([(131, 100)])[0]) for path in (source, target))
    for name, value in exact.items():
        error = np.linalg.norm(rounded[name] - value) / np.linalg.norm(value - value.mean())
        assert 1e-4 < error < 0.2, (name, error)


def test_a_file_of_the_backbone_alone_is_no_detector(exported):
    file = exported('backbone')[1]
    with pytest.raises(ExportError, match='--scope detector'):
        MODELS.build(dict(type='ExportedDetector', file=str(file)))
    with pytest.raises(ExportError, match='use runtime openvino'):
        load_runtime(file, precision='bfloat16')
