"""Training, recalibration, absorption, fusion and deployment compute the same on a GPU as on a CPU."""

import copy
import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from conftest import SLA, SMALL_PVT, SMALL_PVT_V2, SMALL_SWIN, as_trained, pictures, randomize, relative_difference
from graph_cases import build as build_spread
from graph_cases import eager, graphed, is_answered_by_graph, noise, unmatched
from mmdet.registry import MODELS

import slab_det
from slab_det.export import check_parity, export_onnx, load_runtime, random_images
from slab_det.inference.gpu.graph import GraphCache, _Graph

if not torch.cuda.is_available():
    pytest.skip('torch sees no GPU', allow_module_level=True)

PREPBN_PVT = {**SMALL_PVT, 'norm_cfg': dict(type='PRepBN')}
BACKBONES = {
    **{
        norm: {**SMALL_SWIN, 'norm_cfg': dict(type=norm)}
        for norm in ('LN', 'TokenBN', 'PRepBN', 'UN', 'MABN', 'PowerNorm')
    },
    'BN+FFNBN': {**SMALL_SWIN, 'norm_cfg': dict(type='TokenBN'), 'ffn_norm': 'pre_act'},
    'SLA': {**SMALL_SWIN, **SLA},
    'focused': {**SMALL_SWIN, 'attention': 'focused'},
    'PVT': PREPBN_PVT,
    'PVT, SLA': {**PREPBN_PVT, 'attention': 'sla'},
    'PVTv2': {**PREPBN_PVT, **SMALL_PVT_V2},
    'mmdet Swin': dict(type='SwinTransformer', embed_dims=16, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 4)),
    'mmdet PVT': dict(type='PyramidVisionTransformer', embed_dims=16, num_layers=(2, 1, 1, 1), pretrain_img_size=64),
    'mmdet PVTv2': dict(type='PyramidVisionTransformerV2', embed_dims=16, num_layers=(2, 1, 1, 1)),
}
# No multiples of a window, a stride or a reduction.
SIZES = ((75, 102), (129, 66))
ORI_SHAPE = 90, 120


def build(name):
    """A backbone in float64 on the CPU with every weight and statistic random, in eval mode at gamma 0."""
    return as_trained(MODELS.build(copy.deepcopy(BACKBONES[name]))).double()


def relative_rms(outputs, references):
    """The largest RMS of an output's difference over the RMS of its reference; NaN if a value is NaN."""
    squares = [
        (out.cpu().double() - reference).square().mean() / reference.square().mean()
        for out, reference in zip(outputs, references, strict=True)
    ]
    return torch.stack(squares).max().sqrt().item()


@pytest.mark.parametrize('name', BACKBONES)
@torch.no_grad()
def test_fused_and_deployed_compute_the_same(name):
    model = build(name)
    fused = slab_det.fuse(copy.deepcopy(model).cuda())
    single = copy.deepcopy(fused).float()
    forms = fused, slab_det.deploy(fused)
    float32 = slab_det.deploy(single)
    halves = {dtype: slab_det.deploy(single, dtype) for dtype in (torch.float16, torch.bfloat16)}
    for size in SIZES:
        images = torch.randn(2, 3, *size).double()
        reference, images = model(images), images.cuda()
        for form in (copy.deepcopy(model).cuda(), *forms):
            assert relative_difference(form(images), reference) <= 1e-9, size
        own = relative_difference(single(images.float()), reference)
        assert own <= 1e-3, ('TF32, which PyTorch allows convolutions', size)
        assert relative_difference(float32(images.float()), reference) <= 10 * own
        for dtype, half in halves.items():
            with torch.autocast('cuda', dtype):
                own = relative_rms(single(images.float()), reference)
            found = relative_rms(half(images.float()), reference)
            assert found <= 5 * own <= 1, (size, dtype)


@pytest.mark.parametrize('name', [name for name in BACKBONES if not name.startswith('mmdet')])
def test_training_computes_the_same(name):
    """Compares outputs, gradients and statistics of one step at gamma 0.5."""
    cpu = randomize(MODELS.build({**copy.deepcopy(BACKBONES[name]), 'drop_path_rate': 0.0})).double().train()
    slab_det.set_gamma(cpu, 0.5)
    gpu, images = copy.deepcopy(cpu).cuda(), torch.randn(2, 3, 75, 102).double()
    outputs, references = gpu(images.cuda()), cpu(images)
    for found in (outputs, references):
        sum(out.square().mean() for out in found).backward()
    assert relative_difference(outputs, references) <= 1e-9
    gradients = [{key: p.grad for key, p in model.named_parameters() if p.grad is not None} for model in (gpu, cpu)]
    assert gradients[0].keys() == gradients[1].keys()
    # Some gradients are only rounding, such as the gradient of a bias before a norm.
    scale = max(gradient.abs().max() for gradient in gradients[1].values())
    for key, reference in gradients[1].items():
        assert (gradients[0][key].cpu() - reference).abs().max() <= 1e-9 * scale, key
    for (key, found), reference in zip(gpu.state_dict().items(), cpu.state_dict().values(), strict=True):
        torch.testing.assert_close(found.cpu(), reference, rtol=1e-9, atol=1e-9, msg=partial('{}: {}'.format, key))


def test_export_leaves_a_detector_on_the_gpu(small_detector, tmp_path):
    pytest.importorskip('onnxruntime')
    model = small_detector().cuda()
    export_onnx(model, tmp_path / 'model.onnx')
    checks = check_parity(model, load_runtime(tmp_path / 'model.onnx'), random_images(SIZES))
    assert all(check.same for check in checks) and next(model.parameters()).is_cuda


def test_recalibration_computes_the_same(small_detector):
    cpu, images = small_detector().double(), [image.double() for image in pictures()]
    gpu = copy.deepcopy(cpu).cuda()
    for model in (cpu, gpu):
        slab_det.recalibrate(model, images, progress=False)
    for (key, found), reference in zip(gpu.state_dict().items(), cpu.state_dict().values(), strict=True):
        torch.testing.assert_close(found.cpu(), reference, rtol=1e-6, atol=1e-9, msg=partial('{}: {}'.format, key))


@pytest.mark.parametrize('kind', ['SLABSwin', 'SwinTransformer'])
def test_absorption_computes_the_same(small_detector, kind):
    cpu, images = small_detector(type=kind, norm_cfg=dict(type='LN')), pictures(12)
    gpu = copy.deepcopy(cpu).cuda()
    absorbed = [slab_det.absorb(model, images, 1, 'remove', progress=False) for model in (cpu, gpu)]
    shares = [[norm.error for norm in model.absorption_report.norms] for model in absorbed]
    torch.testing.assert_close(torch.tensor(shares[1]), torch.tensor(shares[0]), rtol=0.05, atol=0.01)
    with torch.no_grad():
        references = [level.double() for level in absorbed[0].extract_feat(images[0])]
        assert relative_rms(absorbed[1].extract_feat(images[0].cuda()), references) <= 0.05


@pytest.fixture
def without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)


def deploy(kind='Mask R-CNN', dtype=None, **options):
    return slab_det.deploy(build_spread(kind, random.Random(0)).cuda(), dtype, **options)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_a_graph_in_half_precision_is_near_the_detector(dtype):
    model, data = build_spread('Mask R-CNN', random.Random(0)).cuda(), noise(SIZES[0], ORI_SHAPE)
    deployed = slab_det.deploy(model, dtype)
    (found,), (alone,), (exact,) = graphed(deployed, data), eager(deployed, data), eager(model, data)
    assert is_answered_by_graph(deployed, data) and found.bboxes.dtype == torch.float32
    # Random detectors amplify rounding: the graph may be as far from float32 as the deployed layers without a graph.
    assert unmatched(found, exact, 2, 0.05) <= unmatched(alone, exact, 2, 0.05) + 0.2


def are_captured(cache):
    return all(isinstance(found, _Graph) for found in cache._graphs.values())


def test_threads_capture_graphs_of_two_models():
    models, data = [deploy(), deploy('Faster R-CNN')], noise(SIZES[0], ORI_SHAPE)
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(graphed, models, (data, copy.deepcopy(data)))]
    for model, (one,) in zip(models, found, strict=True):
        assert are_captured(model.predict._graphs) and len(one) == len(graphed(model, data)[0])


def test_a_capture_that_waits_for_the_gpu_warns_once(logged):
    model, data = deploy(), noise(SIZES[0], ORI_SHAPE)
    features = GraphCache(lambda image: (image.sum()[None] * image.sum().item(),))
    image, stream = torch.ones(1, 3, 8, 8).cuda(), torch.cuda.current_stream()
    assert features(image) is None and features(image) is None
    assert torch.cuda.current_stream() == stream
    assert logged.text.count('cannot capture a CUDA graph of inputs of 1x3x8x8') == 1
    # The GPU still works after the failed capture.
    (found,), (expected,) = graphed(model, data), eager(model, data)
    assert len(found) == len(expected)


@torch.no_grad()
def test_a_detector_with_unsupported_heads_has_graphs_of_its_features(small_detector, without_tf32):
    model = slab_det.fuse(small_detector(**SLA).cuda())
    model.roi_head.test_cfg.nms.class_agnostic = True
    model = slab_det.deploy(model)
    for size in SIZES * 2:
        images = torch.randn(1, 3, *size).cuda()
        reference = [level.cpu().double() for level in type(model).extract_feat(model, images)]
        assert relative_rms(model.extract_feat(images), reference) <= 1e-5, size
    graphs = model.extract_feat._graphs
    assert len(graphs._graphs) == 2 and are_captured(graphs) and graphs.num_bytes() > 0
    assert len(graphed(model, noise(SIZES[0], ORI_SHAPE))) == 1


def test_a_detector_is_trained_fused_tested_and_served(call, small_run_cfg, tmp_path):
    cfg = small_run_cfg(max_iters=6)
    cfg.dump(tmp_path / 'config.py')
    run = tmp_path / 'run'
    call('train.py', 'config.py', '--amp')
    entries = json.loads((run / 'report.json').read_text())['entries']
    assert {entry['variant'] for entry in entries} == {'unfused', 'fused'}
    fused = run / 'fused_config.py', run / 'fused.pth'
    call('test.py', *fused, '--deploy', '--dtype', 'float16', '--latency', '--rounds', 3, '--report', 'r.json')
    (entry,) = json.loads((tmp_path / 'r.json').read_text())['entries']
    assert entry['latency']['device'] == torch.cuda.get_device_name() and entry['latency']['dtype'] == 'float16'
    outcome = call('latency.py', fused[0], '--deploy', '--size', 96, 80, '--rounds', 2, '--scope', 'end-to-end')
    assert torch.cuda.get_device_name() in outcome.out, outcome.err
    image = torch.randint(0, 256, (96, 80, 3), dtype=torch.uint8).numpy()
    served = {device: slab_det.load_detector(*fused, device=device) for device in (None, 'cpu')}
    assert next(served[None].model.parameters()).is_cuda
    found, wanted = (
        {key: one(image).pred_instances[key] for key in ('bboxes', 'scores', 'labels')} for one in served.values()
    )
    assert len(wanted['scores']) and abs(len(found['scores']) - len(wanted['scores'])) <= 1
    assert (found['scores'][:5] - wanted['scores'][:5]).abs().max() < 0.01
