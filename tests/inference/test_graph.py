"""Deployed detectors find the same in CUDA graphs as without; tests without a GPU replace graphs by CPU calls."""

import copy
import random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from graph_cases import (
    CONFIGS,
    QUERIES,
    SEGMENTERS,
    EagerOperators,
    build,
    eager,
    graphed,
    is_answered_by_graph,
    noise,
    unmatched,
)
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from mmengine.structures import InstanceData
from pycocotools import mask as coco_mask

import slab_det
from slab_det.families.operators import anchors
from slab_det.inference.gpu import box_kernels, graph, kernels
from slab_det.inference.gpu.graph import GraphCache
from slab_det.measure.cost import count_multiply_adds

ON_GPU = torch.cuda.is_available()
DEVICE = 'cuda' if ON_GPU else 'cpu'
ORI_SHAPE = 90, 120
SIZES = ((75, 102), (130, 66))


@pytest.fixture(autouse=True)
def captured_shapes(monkeypatch):
    """The shape of the first input of each capture. Without a GPU, a stand-in for a graph takes 100 of 1000 bytes."""
    shapes, capture, pools = [], GraphCache._capture, {None: 0}

    def call_as_graph(self, inputs):
        self._make_room()
        self._pool = self._pool or (0, len(pools))
        pools[self._pool] = pools.get(self._pool, 0) + 100
        held = tuple(x.clone() for x in inputs)
        outputs = self._function(*held)

        def replay():
            for output, value in zip(outputs, self._function(*held), strict=True):
                output.copy_(value)
                time.sleep(0)

        return graph._Graph(SimpleNamespace(replay=replay), held, outputs, [], 0)

    def record(self, inputs):
        shapes.append(tuple(inputs[0].shape))
        return (capture if ON_GPU else call_as_graph)(self, inputs)

    monkeypatch.setattr(GraphCache, '_capture', record)
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    if not ON_GPU:
        may_replay, on_gpu = graph._may_replay, SimpleNamespace(is_cuda=True)
        monkeypatch.setattr(graph, '_may_replay', lambda model, image: may_replay(model, on_gpu))
        monkeypatch.setattr(graph, 'FixedOperators', EagerOperators)
        monkeypatch.setattr(graph, '_pool_bytes', pools.get)
        monkeypatch.setattr(graph.mask_kernels, 'triton_paste_masks', graph.paste_masks)
        monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda self: self)
        monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
        monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
        stream = SimpleNamespace(wait_event=lambda event: None, record_event=object)
        monkeypatch.setattr(torch.cuda, 'current_stream', lambda: stream)
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(total_memory=1000))
        monkeypatch.setattr(import_module('slab_det.inference.deployment'), '_is_on_cpu', lambda model: False)
    return shapes


def deployed(kind='Mask R-CNN', **options):
    return copy.deepcopy(deployed_once(kind, **options))


@cache
def deployed_once(kind, **options):
    return slab_det.deploy(build(kind, random.Random(0)).to(DEVICE), **options)


def assert_same(found, expected):
    """Exact on a CPU; on a GPU, two calls may choose kernels that round differently."""
    assert len(expected)
    if ON_GPU:
        assert unmatched(found, expected) <= 0.02
    else:
        assert all(torch.equal(found[key], expected[key]) for key in ('bboxes', 'scores', 'labels', 'masks'))


@pytest.mark.parametrize('kind', [*CONFIGS, *QUERIES])
def test_a_graph_finds_what_the_detector_finds(kind, captured_shapes):
    """Alternates two sizes, so that each graph is replayed."""
    model, answered = deployed(kind), 0
    for size in SIZES * 2:
        data = noise(size, ORI_SHAPE)
        (found,), (expected,) = graphed(model, data), eager(model, data)
        share = unmatched(found, expected)
        assert len(expected) and share <= 0.02, (size, share)
        answered += is_answered_by_graph(model, data)
        if 'masks' in expected and len(found) == len(expected):
            # On a GPU, mmdet draws the mask of a box without area across the whole image.
            has_area = (expected.bboxes[:, 2:] > expected.bboxes[:, :2]).all(1)
            assert (found.masks != expected.masks)[has_area].float().mean() <= 1e-3, size
    assert answered and len(captured_shapes) == 2


@pytest.mark.parametrize('kind', SEGMENTERS)
@torch.no_grad()
def test_a_graph_finds_the_masks_that_the_detector_finds(kind, captured_shapes):
    model, seen = deployed(kind), set()
    for size in SIZES * 2:
        data = noise(size, ORI_SHAPE)
        (found,) = model.test_step(data)
        data = model.data_preprocessor(data, False)
        (expected,) = type(model).predict(model, data['inputs'], copy.deepcopy(data['data_samples']))
        segments = expected.pred_panoptic_seg.sem_seg
        assert (found.pred_panoptic_seg.sem_seg == segments).float().mean() > 0.99
        seen |= {*segments.unique().tolist()}
        found, expected = found.pred_instances, expected.pred_instances
        assert unmatched(found, expected, boxes=1) <= 0.02 and found.masks.shape == expected.masks.shape
    assert len(captured_shapes) == 2 and len(seen) > 1


@pytest.mark.parametrize('kind', ['DINO', 'Mask2Former'])
def test_a_graph_of_queries_in_half_precision_finds_what_the_detector_finds(kind):
    model, data = deployed(kind, dtype=torch.bfloat16), noise(SIZES[0], ORI_SHAPE)
    (found,), (expected,) = graphed(model, data), eager(model, data)
    assert is_answered_by_graph(model, data) and len(expected) > 10
    # On a GPU, two calls may choose kernels that round differently, and queries are then others.
    assert len(found) == len(expected) and (ON_GPU or all(torch.equal(x, expected[key]) for key, x in found.items()))


def test_an_image_with_too_many_candidates_is_predicted_without_graph(monkeypatch):
    monkeypatch.setattr(box_kernels, 'CANDIDATES', 8)
    model, data = deployed(), noise((75, 102), ORI_SHAPE)
    assert not is_answered_by_graph(model, data)
    (found,), (expected,) = graphed(model, data), eager(model, data)
    assert len(expected) > 8
    assert_same(found, expected)


def test_unsupported_calls_run_predict_of_the_class(monkeypatch):
    model, asked = deployed(), []
    monkeypatch.setattr(GraphCache, '__call__', lambda self, *inputs, **options: asked.append(inputs))
    monkeypatch.setattr(TwoStageDetector, 'predict', lambda *arguments: 'eager')
    (sample,) = noise((64, 96), ORI_SHAPE)['data_samples']
    image, proposed = torch.zeros(1, 3, 64, 96, device=DEVICE), copy.deepcopy(sample)
    proposed.proposals = InstanceData(bboxes=torch.zeros(1, 4))

    def is_asked(*arguments):
        asked.clear()
        assert model.predict(*arguments) == 'eager'
        return bool(asked)

    with torch.no_grad():
        assert is_asked(image, [sample])
        assert not is_asked(image, [sample], False)
        assert not is_asked(image, [proposed])
        assert not is_asked(image.expand(2, -1, -1, -1), [sample, sample])
        with monkeypatch.context() as patch:
            patch.setattr(torch, 'is_autocast_enabled', lambda device: device == 'cuda')
            assert not is_asked(image, [sample])
        model.train()
        assert not is_asked(image, [sample])
    model.eval()
    assert not is_asked(image, [sample]), 'gradients'


def test_kernels_and_graphs_leave_operators_to_a_counter(monkeypatch):
    """The counter of multiply-adds knows no kernels, and sees no operators in a graph."""
    on_gpu = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=torch.cuda.current_device()))
    monkeypatch.setattr(kernels, 'triton', SimpleNamespace())
    assert kernels.can_run(on_gpu)
    asked = []
    count_multiply_adds(lambda: asked.append(kernels.can_run(on_gpu)))
    assert asked == [False]


@pytest.mark.parametrize('dtype', [None, torch.bfloat16], ids=str)
def test_multiply_adds_of_a_deployed_detector_are_those_of_the_original(dtype):
    model, counts = build('Mask R-CNN', random.Random(0)).to(DEVICE), []
    image, data = torch.randn(1, 3, 75, 102, device=DEVICE), noise((75, 102), ORI_SHAPE)
    regions = torch.randn(5, model.neck.out_channels, 14, 14, device=DEVICE)
    for form in (model, slab_det.deploy(model, dtype)):
        parts = (form.extract_feat, image), (form.roi_head.mask_head, regions), (form.test_step, data)
        counts.append([count_multiply_adds(lambda part=part, x=x: part(x)) for part, x in parts])
    # Rounding changes the number of objects, and so the last count.
    for original, deployed, difference in zip(*counts, (1e-3, 1e-3, 0.2), strict=True):
        assert deployed == pytest.approx(original, rel=difference), counts


def test_a_changed_score_thr_takes_effect():
    model, data = deployed(), noise((75, 102), ORI_SHAPE)
    (before,) = graphed(model, data)
    threshold = before.scores.median().item()
    model.roi_head.test_cfg.score_thr = threshold
    (found,), (expected,) = graphed(model, data), eager(model, data)
    assert found.scores.min() > threshold and unmatched(found, expected) <= 0.02


def test_moved_weights_with_other_values_reach_the_heads():
    """As ``to`` of another device, and ``load_state_dict(assign=True)``, leave them; heads have copies of weights."""
    model, data = deployed(), noise((75, 102), ORI_SHAPE)
    (before,) = graphed(model, data)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1
    (found,), (expected,) = graphed(model, data), eager(model, data)
    assert unmatched(found, expected) <= 0.02 < unmatched(found, before)


def test_threads_make_one_family_of_the_weights(monkeypatch):
    model, data, made, make = deployed(), noise((75, 102), ORI_SHAPE), [], graph.make_family

    def slowly(*arguments, **options):
        made.append(arguments)
        time.sleep(0.05)
        return make(*arguments, **options)

    monkeypatch.setattr(graph, 'make_family', slowly)
    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(lambda _: graphed(model, copy.deepcopy(data))[0], range(4))]
    assert len(made) == 1
    for found in results[1:]:
        assert_same(found, results[0])


def test_copied_and_loaded_detectors_capture_their_own_graphs(captured_shapes, tmp_path):
    model, data = deployed(), noise((75, 102), ORI_SHAPE)
    (expected,) = graphed(model, data)
    torch.save(model, tmp_path / 'model.pt')
    for other in (copy.deepcopy(model), torch.load(tmp_path / 'model.pt', weights_only=False)):
        (found,) = graphed(other, data)
        assert_same(found, expected)
        assert other.predict is not model.predict and is_answered_by_graph(other, data)
    assert len(captured_shapes) == 3


def test_rle_masks_encode_the_full_masks():
    model, data = build('Mask R-CNN', random.Random(0)).to(DEVICE), noise((75, 102), ORI_SHAPE)
    (full,), (rle,) = (graphed(slab_det.deploy(model, masks=form), data) for form in ('full', 'rle'))
    if ON_GPU:
        # Pixels on an edge may round differently.
        decoded = coco_mask.decode(rle.masks).transpose(2, 0, 1).astype(bool)
        assert len(full) and (full.masks.cpu().numpy() != decoded).mean() <= 1e-4
    else:
        assert len(full) and rle.masks == [coco_mask.encode(np.asfortranarray(mask.numpy())) for mask in full.masks]


def test_unsupported_heads_run_after_a_graph_of_the_features(logged, captured_shapes):
    model, data = build('Mask R-CNN', random.Random(0)).to(DEVICE), noise((64, 96), ORI_SHAPE)
    for layer in model.roi_head.mask_roi_extractor.roi_layers:
        layer.sampling_ratio = 2
    model = slab_det.deploy(model)
    assert 'not the heads: a graph of detections needs square RoIAlign with sampling_ratio=0' in logged.text
    (found,), (expected,) = graphed(model, data), eager(model, data)
    assert_same(found, expected)
    assert captured_shapes == [(1, 3, 64, 96)]
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1
    (found,), (expected,) = graphed(model, data), eager(model, data)
    assert_same(found, expected)
    # A graph keeps the memory of the weights that it reads.
    assert len(captured_shapes) == 2 and len(model.extract_feat._graphs._graphs) == 1, 'graphs of the former weights'


def test_a_failed_capture_warns_once_and_predicts_without_graph(monkeypatch, logged):
    def fail(self, inputs):
        raise RuntimeError('no memory')

    monkeypatch.setattr(GraphCache, '_capture', fail)
    model, data = deployed(), noise((64, 96), ORI_SHAPE)
    (expected,) = eager(model, data)
    for _ in range(2):
        (found,) = graphed(model, data)
        assert_same(found, expected)
    assert logged.text.count('a CUDA graph of inputs of 1x3x64x96') == logged.text.count('no memory') == 1


@pytest.mark.parametrize('tries', [2, 3])
def test_a_failed_capture_is_tried_again_later(monkeypatch, logged, tries):
    monkeypatch.setattr(graph, 'RETRY_AFTER', 4)
    capture, failures = GraphCache._capture, []

    def fail_at_first(self, inputs):
        if len(failures) < tries:
            failures.append(inputs[0].shape)
            raise RuntimeError('no memory')
        return capture(self, inputs)

    monkeypatch.setattr(GraphCache, '_capture', fail_at_first)
    cache, x = GraphCache(lambda x: (2 * x,)), torch.ones(3, device=DEVICE)
    answered = [cache(x) is not None for _ in range(30)]
    # The second try comes after four calls without a graph; the third one is the last.
    expected = [False] * 10 + [True] * 20 if tries == 2 else [False] * 30
    assert answered == expected and len(failures) == tries
    assert logged.text.count('no memory') == tries and logged.text.count('the next try after 4 of them') == 2


@pytest.mark.skipif(ON_GPU, reason='the memory of real graphs is not known')
@pytest.mark.parametrize(('max_graphs', 'share', 'expected'), [(2, 0.25, (1, 2, 3, 2)), (64, 0.15, (1, 2, 3, 1, 2))])
def test_graphs_are_dropped_where_there_are_too_many_or_they_take_too_much(
    monkeypatch, captured_shapes, max_graphs, share, expected
):
    """Too many: the least recently used one. Too much memory: all, because their common pool shrinks only then."""
    monkeypatch.setattr(graph, 'MAX_GRAPHS', max_graphs)
    monkeypatch.setattr(graph, 'MAX_SHARE', share)
    cache = GraphCache(lambda x: (2 * x,))
    for size in (1, 2, 1, 3, 1, 2):
        assert torch.equal(cache(torch.full((size,), 1.0))[0], torch.full((size,), 2.0))
    assert captured_shapes == [(size,) for size in expected] and cache.num_bytes() <= 1000 * share + 100


def test_anchors_of_many_sizes_are_released():
    generator = AnchorGenerator([8], [1.0], scales=[4])
    made = [weakref.ref(anchors(generator, ((side, side),), torch.device('cpu'))) for side in range(1, 40)]
    assert 1 <= sum(one() is not None for one in made) <= 16


def test_each_thread_gets_its_own_results():
    cache = GraphCache(lambda x: (2 * x, 3 * x))

    def ask(i):
        return [x.tolist() for x in cache(torch.full((4,), float(i), device=DEVICE))]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(200))) == [[[2.0 * i] * 4, [3.0 * i] * 4] for i in range(200)]
