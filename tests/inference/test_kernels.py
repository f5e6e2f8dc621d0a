"""Kernels compute what PyTorch's operators compute; without a GPU they run in Triton's interpreter."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_difference
from graph_cases import QUERIES, SEGMENTERS, EagerOperators, build, noise
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from mmdet.registry import MODELS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slab_det.backbones.adopt import replace_layers
from slab_det.backbones.blocks import ConvFFN, LinearFFN
from slab_det.families import Frame, deformable, find_family
from slab_det.families.deformable import deployed_deformable, sample_maps
from slab_det.families.masks import paste_masks
from slab_det.families.operators import EMPTY, map_levels
from slab_det.fusion.channels import resize_channels
from slab_det.inference.gpu import box_kernels, deformable_kernels, kernels, mask_kernels
from slab_det.inference.gpu.box_kernels import FixedOperators
from slab_det.inference.gpu.ffn_kernels import TritonFFN, triton_ffn
from slab_det.inference.gpu.graph import make_family, measure_frame
from slab_det.inference.gpu.window_kernels import TritonWindowAttention, triton_windows

pytestmark = [
    pytest.mark.skipif(kernels.triton is None, reason='this PyTorch comes without Triton'),
    pytest.mark.filterwarnings('ignore:invalid value encountered', 'ignore:divide by zero encountered'),
]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@pytest.fixture(autouse=True)
def run_kernels(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, 'can_run', lambda x: True)


def some_boxes(groups, count, spread=60.0):
    low, size = torch.rand(groups, count, 2) * spread, torch.rand(groups, count, 2) * 40 + 1
    # Rounded to halves, so that many overlaps are equal, and some equal the threshold.
    return (torch.cat([low, low + size], -1) * 2).round().div(2).to(DEVICE)


@pytest.mark.parametrize(
    ('fill', 'groups', 'count'),
    [
        *(('all', *shape) for shape in ((1, 1), (2, 64), (2, 65), (1, 130))),
        *((fill, 2, 70) for fill in ('some', 'none', 'NaN', 'equal', 'ties')),
    ],
)
def test_nms(fill, groups, count):
    boxes, scores = some_boxes(groups, count), torch.rand(groups, count, device=DEVICE).sort(1, True).values
    if fill == 'some':
        scores = torch.where(torch.rand_like(scores) < 0.3, EMPTY, scores)
        scores[:, count // 2 + 1 :] = EMPTY
    elif fill == 'none':
        scores.fill_(EMPTY)
    elif fill == 'NaN':
        boxes[:, ::3, 2] = torch.nan
    elif fill == 'equal':
        boxes[:] = boxes[:, :1]
    elif fill == 'ties':
        scores = (scores * 4).ceil() / 4
    labels = torch.randint(0, 2, (groups, count), device=DEVICE) if fill == 'all' else torch.zeros_like(scores).long()
    stride = FixedOperators().stride(boxes, scores)
    if fill == 'NaN':
        assert not stride.isfinite() and not EagerOperators().stride(boxes, scores).isfinite()
        # Stride 0 leaves boxes in index: at an infinite stride, none would overlap another.
        stride = torch.zeros_like(stride)
    else:
        assert torch.equal(stride, EagerOperators().stride(boxes, scores))
    for limit in (1000, 3):
        arguments = boxes, scores, labels, stride, 0.5, limit
        (found, index), (expected, expected_index) = (
            FixedOperators().suppress(*arguments),
            EagerOperators().suppress(*arguments),
        )
        assert torch.equal(found, expected), limit
        there = found > EMPTY
        assert torch.equal(index[there], expected_index[there]), limit
        if fill == 'equal':
            assert there.sum() == groups


@pytest.mark.parametrize('classes', [1, 80])
def test_class_scores(classes):
    logits, found = 3 * torch.randn(7, classes + 9, device=DEVICE), torch.rand(7, device=DEVICE)
    logits[1], logits[2, 0], found[3] = 0, torch.nan, EMPTY
    arguments = logits[:, : classes + 1], found, 0.05
    expected = EagerOperators().class_scores(*arguments)
    torch.testing.assert_close(FixedOperators().class_scores(*arguments), expected, rtol=1e-5, atol=1e-7)
    assert (expected == EMPTY).any() and (expected > EMPTY).any()


@pytest.mark.parametrize('clip', [True, False])
def test_decode(clip):
    coder = DeltaXYWHBBoxCoder((0.1, 0, 0, 0.2), (0.1, 0.1, 0.2, 0.3), clip_border=clip)
    priors, values = some_boxes(1, 9)[0], 9 * torch.randn(9, 4, device=DEVICE)
    values[4, 1], limits = torch.nan, torch.tensor([50.0, 40, 50, 40], device=DEVICE)
    index = torch.tensor([[8, 0, 0], [3, 4, 1]], device=DEVICE)
    for arguments in ((values, limits, index), (9 * torch.randn(9, 3, 4, device=DEVICE), limits)):
        found = FixedOperators().decode(coder, priors, *arguments)
        expected = EagerOperators().decode(coder, priors, *arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_choice_of_anchors_and_candidates():
    """Two levels have fewer anchors than asked for; no two scores are equal."""
    levels = [torch.randn(count, device=DEVICE) for count in (30, 7, 1)]
    found, expected = FixedOperators().topk(levels, 9), EagerOperators().topk(levels, 9)
    there = expected[0] > EMPTY
    assert there.sum() == 9 + 7 + 1
    torch.testing.assert_close(found[0], expected[0])
    assert all(torch.equal(a[there].long(), b[there]) for a, b in zip(found[1:], expected[1:], strict=True))
    scores, corners = torch.rand(50, device=DEVICE), some_boxes(1, 50)[0]
    for a, b in zip(
        FixedOperators().candidates(scores, corners), EagerOperators().candidates(scores, corners), strict=True
    ):
        assert torch.equal(a, b)


def test_choice_of_scores_above_a_threshold():
    """The second level has fewer above the threshold than asked for, the third has none, and a NaN is not above."""
    levels = [torch.randn(30, device=DEVICE), torch.tensor([2.0, -3, torch.nan, 1], device=DEVICE) - 0.5]
    scored = [level.sigmoid() for level in (*levels, torch.full((5,), -9.0, device=DEVICE))]
    (scores, index), expected = (kind().topk_above(scored, 3, 0.5) for kind in (FixedOperators, EagerOperators))
    assert torch.equal(scores, expected[0]) and (scores > EMPTY).tolist() == [True] * 5 + [False] * 4
    assert torch.equal(index[:5], expected[1][:5]) and index[3:5].tolist() == [30, 33]


@pytest.mark.parametrize(('channels', 'bins', 'dtype'), [(5, 3, torch.float32), (16, 2, torch.float16)], ids=str)
def test_roi_align(channels, bins, dtype):
    extractor = SingleRoIExtractor(
        dict(type='RoIAlign', output_size=bins, sampling_ratio=0), channels, [4, 8, 16, 32], finest_scale=14
    )
    features = [torch.randn(1, channels, max(1, 10 // s), max(1, 15 // s), device=DEVICE) for s in (1, 2, 4, 8)]
    features = [level.to(dtype) for level in features]
    inside = [[1.6, 2.2, 40.1, 25.7], [0, 0, 60, 40], [5.3, 2.5, 6.2, 18]]
    outside = [[-10, -15, 75, 50], [250, 250, 300, 350]]
    corners = torch.tensor([*inside, *outside, [1, 1, 1, 1], [5, 5, 2, 2]], device=DEVICE)
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, EMPTY], device=DEVICE)
    (found, _), (expected, _) = (
        kind().pool(extractor, features, corners, scores) for kind in (FixedOperators, EagerOperators)
    )
    assert found.dtype == dtype and {*map_levels(extractor, corners).tolist()} >= {0, 1}
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    assert (found - expected)[:6].abs().max() <= bound
    nothing, _ = FixedOperators().pool(extractor, features, corners[:0], scores[:0])
    assert nothing.shape == (0, channels, bins, bins)


@pytest.mark.parametrize('attention', ['softmax', 'sla'])
# The maps need padding. One case has two heads, and one more than 64 slots per window.
@pytest.mark.parametrize(('window', 'heads', 'size'), [(7, 2, (34, 20)), (9, 1, (20, 40))])
@torch.no_grad()
def test_window_attention(attention, window, heads, size):
    arguments = dict(attention=attention, embed_dims=16 * heads, num_heads=(heads,), window_size=window)
    model = MODELS.build(dict(type='SLABSwin', depths=(2,), strides=(4,), out_indices=(0,), **arguments))
    model.eval().to(DEVICE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    compare_windows(model, torch.randn(2, 3, *size, device=DEVICE))


def compare_windows(model, images):
    expected = model(images)
    replace_layers(model, triton_windows)
    assert sum(isinstance(module, TritonWindowAttention) for module in model.modules()) == 2
    assert relative_difference(model(images), expected) <= 1e-5


@torch.no_grad()
def test_window_attention_with_fewer_channels_per_head():
    arguments = dict(embed_dims=48, num_heads=(2,), depths=(2,), strides=(4,), out_indices=(0,))
    model = MODELS.build(dict(type='SLABSwin', **arguments)).eval()
    resize_channels(model, {f'stages.0.blocks.{i}.attn.w_msa': 32 for i in range(2)})
    compare_windows(model.to(DEVICE), torch.randn(1, 3, 34, 20, device=DEVICE))


@pytest.mark.parametrize('size', [(17, 23), (3, 600)])
def test_paste_masks(size):
    corners = [[1.2, 2.5, 9.1, 14.7], [0, 0, 20, 17], [4.3, 2.5, 5.2, 16], [-30, -30, 560, 10], [900, 1, 990, 9]]
    # Boxes without width, without height, and without both.
    corners = torch.tensor([*corners, [5, 1.2, 5, 20], [3, 2.2, 30, 2.2], [6, 6, 6, 6]], device=DEVICE)
    masks = torch.rand(len(corners), 28, 28, device=DEVICE)
    expected = paste_masks(masks.cpu(), corners.cpu(), size, 0.5)
    found = mask_kernels.triton_paste_masks(masks, corners, size, 0.5)
    assert found.dtype == torch.bool and (found.cpu() != expected).sum() <= (0 if DEVICE == 'cpu' else 2)
    assert mask_kernels.triton_paste_masks(masks[:0], corners[:0], size, 0.5).shape == (0, *size)


@pytest.mark.parametrize(('fine', 'coarse'), [((8, 12), (4, 6)), ((25, 1), (13, 1)), ((3, 3), (5, 5))])
def test_add_upsampled(fine, coarse):
    x, y = (torch.randn(2, 5, *size, device=DEVICE) for size in (fine, coarse))
    assert torch.equal(kernels.add_upsampled(x.clone(), y), x + F.interpolate(y, fine))


@pytest.mark.parametrize(
    ('kind', 'channels', 'hidden', 'activation'),
    [(LinearFFN, 16, 8, 'GELU'), (LinearFFN, 48, 128, 'ReLU'), (ConvFFN, 64, 72, 'GELU')],
)
@torch.no_grad()
def test_ffn(kind, channels, hidden, activation):
    ffn = triton_ffn(kind(channels, hidden, dict(type=activation)).eval()).to(DEVICE, torch.float16)
    assert isinstance(ffn, TritonFFN)
    x, identity = torch.randn(2, 2, 67, channels, device=DEVICE, dtype=torch.float16)
    expected = copy.deepcopy(ffn.ffn).float()(x.float(), (1, 67), identity.float())
    assert (ffn(x, (1, 67), identity).float() - expected).abs().max() <= 0.01


def test_ffns_of_unsupported_widths_are_not_fused():
    assert triton_ffn(LinearFFN(24, 40, dict(type='GELU'))) is None
    assert triton_ffn(LinearFFN(40, 40, dict(type='GELU'))) is triton_ffn(nn.Linear(16, 16)) is None


@pytest.mark.parametrize(
    ('references', 'channels', 'dtype'), [(2, 8, torch.float32), (4, 5, torch.float32), (4, 8, torch.float16)], ids=str
)
def test_deformable_attention(references, channels, dtype):
    """Two images, two heads, three levels of three points; samples inside, on the edge, and far outside."""
    sizes, queries = ((7, 11), (4, 1), (1, 3)), 21
    keys = sum(height * width for height, width in sizes)
    values = torch.randn(2, keys, 2, channels, device=DEVICE).to(dtype)
    centers = torch.rand(2, queries, 3, references, device=DEVICE) * 1.2 - 0.1
    offsets = 2 * torch.randn(2, queries, 2, 3, 3, 2, device=DEVICE).to(dtype)
    logits = 2 * torch.randn(2, queries, 2, 9, device=DEVICE).to(dtype)
    offsets[0, 3], offsets[0, 4], offsets[0, 5, 0, 1, 2, 0] = 60000, -60000, torch.nan
    offsets[0, 6, 0, 0, 0, 0], offsets[0, 7] = torch.inf, 0
    found = deformable_kernels.triton_sample_maps(values, sizes, centers, offsets, logits)
    # A sample without a position is outside, as in mmcv's compiled operator.
    offsets = torch.where(offsets.isfinite(), offsets, 60000)
    expected = sample_maps(values.double(), sizes, centers.double(), offsets.double(), logits.double())
    assert found.dtype == dtype and found.shape == (2, queries, 2 * channels) and expected.abs().max() > 1
    # float16 rounds the sum of values once; its offsets are rounded already.
    bound = 2e-5 if dtype == torch.float32 else 2e-3
    assert (found - expected).abs().max() <= bound
    assert not found[0, 3:5].any()


def test_add_bias():
    x, bias = torch.randn(2, 5, 20, 33, device=DEVICE), torch.randn(5, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(kernels.add_bias(x.clone(), bias), x + bias[:, None, None])


class NoSync(TorchDispatchMode):
    """Refuses the operators that ask a GPU for values, which a capture refuses."""

    names = '_local_scalar_dense', 'nonzero', 'masked_select', 'equal', 'is_nonzero', '_unique2', 'repeat_interleave'

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith('index') and any(x is not None and x.dtype == torch.bool for x in args[1])
        assert name not in self.names and not by_mask, f'{func} waits for the GPU'
        return func(*args, **kwargs or {})


# With other seeds, scores are equal or boxes have no area.
@pytest.mark.parametrize(
    ('kind', 'seed'), [('Cascade R-CNN', 0), ('ATSS', 0), ('FCOS', 0), ('RTMDet', 0), ('RTMDet-Ins', 2)]
)
@torch.no_grad()
def test_heads_find_the_same_in_kernels_and_never_wait_for_the_gpu(kind, seed, monkeypatch):
    def pool(self, extractor, features, boxes, scores):
        waves = torch.arange(16 * 49, device=DEVICE).view(16, 7, 7) * boxes.sum(1)[:, None, None, None] / 99
        return waves.sin().repeat(1, 2, 1, 1), None

    # RoIAlign has a test of its own; the interpreter takes minutes for these regions, and seconds for all candidates.
    monkeypatch.setattr(box_kernels, 'CANDIDATES', 64)
    for kind_of_operators in (EagerOperators, FixedOperators):
        monkeypatch.setattr(kind_of_operators, 'pool', pool)
    model = build(kind, random.Random(seed)).to(DEVICE)
    for name in ('rpn_head', 'bbox_head', 'roi_head'):
        cfg = getattr(getattr(model, name, None), 'test_cfg', {})
        few = dict(nms_pre=10, max_per_img=10, score_thr=0.01)
        cfg.update({key: value for key, value in few.items() if key in cfg})
    data = model.data_preprocessor(noise((64, 96), (90, 120)), False)
    frame = Frame(*measure_frame(data['data_samples'][0].metainfo).to(DEVICE))
    features, expected = model.extract_feat(data['inputs']), None
    for operators in (EagerOperators(), FixedOperators()):
        family = find_family(model)(model, operators)
        found = family.detect(features, frame, family.score_thr)
        expected = expected or found
    with NoSync():
        family.detect(features, frame, family.score_thr)
    with NoSync(), pytest.raises(AssertionError, match='waits for the GPU'):
        find_family(model)(model, EagerOperators()).detect(features, frame, family.score_thr)
    there = expected.scores > EMPTY
    assert there.sum() > 3 and bool(found.exact) == bool(expected.exact)
    assert torch.equal(found.scores > EMPTY, there) and torch.equal(found.labels[there], expected.labels[there])
    torch.testing.assert_close(found.scores[there], expected.scores[there])
    torch.testing.assert_close(found.corners[there], expected.corners[there], rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_queries_find_the_same_in_kernels_and_never_wait_for_the_gpu(monkeypatch):
    model = build('DINO', random.Random(0)).to(DEVICE)
    # The interpreter takes seconds for a few pixels.
    data = model.data_preprocessor(noise((20, 32), (40, 60)), False)
    # On a GPU, mmcv's own attention needs compiled operators.
    replace_layers(model, deformable_kernels.triton_deformable)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, 'can_run', lambda x: False)
        (expected,) = model(**data, mode='predict')
    features, frame = model.extract_feat(data['inputs']), measure_frame(data['data_samples'][0].metainfo).to(DEVICE)
    family = find_family(model)(model, FixedOperators())
    with NoSync():
        computed = family.compute(features, Frame(*frame, padded=(20, 32)))
    with NoSync(), pytest.raises(AssertionError, match='waits for the GPU'):
        model.forward_transformer(features, data['data_samples'])
    found, expected = family.predict(computed, data['data_samples'][0].metainfo, None), expected.pred_instances
    assert len(found) == len(expected) > 20 and torch.equal(found.labels, expected.labels)
    torch.testing.assert_close(found.scores, expected.scores)
    torch.testing.assert_close(found.bboxes, expected.bboxes, rtol=1e-4, atol=1e-3)


class OnDevice(TorchDispatchMode):
    """Refuses tensors on the host, whose values a capture cannot copy to the GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)}
        assert 'cpu' not in devices, f'{func} has a tensor on the host'
        return out


@pytest.fixture(scope='module')
def fake_gpu():
    """Tensors without values on a GPU that is not there: a value that the host asks for is an error."""
    return FakeTensorMode()


@pytest.mark.skipif(DEVICE == 'cuda', reason='real captures test the same')
@pytest.mark.parametrize('kind', [*QUERIES, *SEGMENTERS])
@torch.no_grad()
def test_a_graph_of_queries_holds_no_tensor_of_the_host(kind, fake_gpu, monkeypatch):
    def sample(values, sizes, references, offsets, logits):
        return values.new_empty(*logits.shape[:2], values[0, 0].numel())

    monkeypatch.setattr(deformable, 'sample_maps', sample)
    model = build(kind, random.Random(0))
    replace_layers(model, deployed_deformable)
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            fakes = {name: fake_gpu.from_tensor(x.detach()) for name, x in values.items() if x is not None}
            with fake_gpu:
                values.update({name: nn.Parameter(x.to('cuda'), False) for name, x in fakes.items()})
    with fake_gpu:
        image, frame = torch.empty(1, 3, 64, 96, device='cuda'), torch.empty(3, 4, device='cuda')
        family = make_family(model, FixedOperators())
        # Makes constants, as before a capture.
        family.run(image, frame)
        with OnDevice():
            first, second, *_ = family.run(image, frame)
        with OnDevice(), pytest.raises(AssertionError, match='tensor on the host'):
            torch.tensor(1, device='cuda')
    assert (second.shape[1:] == (16, 24) and first.shape[0] == 20) if kind in SEGMENTERS else second.shape[1:] == (4,)
