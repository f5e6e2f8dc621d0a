"""Runs a deployed detector as CUDA graphs, one for each size of image."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from slab_det.deployment.constants import used_constants
from slab_det.deployment.detection import EMPTY
from slab_det.deployment.gpu import box_kernels, kernels
from slab_det.deployment.gpu.static import Frame, StaticDetector
from slab_det.deployment.masks import paste_masks
from slab_det.deployment.supported import Unsupported

# Largest number of graphs of a model, and largest share of the GPU's memory for them. The graphs of a model share one
# pool of memory, because they never run at the same time.
MAX_GRAPHS, MAX_SHARE = 64, 0.25
# PyTorch captures one graph at a time, on one stream of the process.
_capturing = Lock()


@dataclass(frozen=True)
class _Graph:
    """A captured call, the constants that it reads (``used``), and the memory that it added to the pool."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    used: list
    num_bytes: int


class GraphCache:
    """Runs a function of tensors as CUDA graphs: its kernels are launched at once, and Python does not run.

    A graph is captured for each shape of the inputs, in about a tenth of a second. Beyond ``MAX_GRAPHS`` or
    ``MAX_SHARE``, the least recently used graph is dropped. Threads take turns.

    Args:
        function: Returns a tuple of tensors, and never waits for the GPU.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function, self._lock = function, Lock()
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._pool: tuple[int, int] | None = None

    def __call__(self, *inputs: Tensor, settings: Hashable = ()) -> tuple[Tensor, ...] | None:
        """Returns copies of the function's results, or None if the function cannot be captured.

        Args:
            *inputs: Tensors on the GPU, or pinned tensors, which are copied to the GPU.
            settings: Everything else that the function reads; each value has its own graph.
        """
        key = settings, tuple((x.shape, x.dtype, x.device) for x in inputs)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if key not in self._graphs:
                self._graphs[key] = self._try_capture(inputs)
            self._graphs.move_to_end(key)
            found = self._graphs[key]
            if found is None:
                return None
            for static, given in zip(found.inputs, inputs, strict=True):
                static.copy_(given, non_blocking=True)
            found.graph.replay()
            # The next replay, of any thread, overwrites them.
            return tuple(output.clone() for output in found.outputs)

    def _try_capture(self, inputs: tuple[Tensor, ...]) -> _Graph | None:
        try:
            return self._capture(inputs)
        except Exception as error:
            reason = ' '.join(f'{type(error).__name__}: {error}'.split())
            shapes = ', '.join('x'.join(map(str, x.shape)) for x in inputs)
            MMLogger.get_current_instance().warning(
                f'deployed detector: no CUDA graph of inputs of {shapes} ({reason}); such images run without, several '
                'times slower'
            )
            torch.cuda.synchronize()
            return None

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Graph:
        device = next(x.device for x in inputs if x.is_cuda)
        # A capture that fails leaves its stream as the current one in some versions of PyTorch.
        here = torch.cuda.stream(torch.cuda.current_stream(device))
        with _capturing, torch.cuda.device(device), here, used_constants() as used:
            inputs = tuple(torch.empty_like(x, device=device).copy_(x) for x in inputs)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # Libraries choose their kernels, Triton compiles, and constants are made.
                for _ in range(2):
                    self._function(*inputs)
            torch.cuda.current_stream().wait_stream(side)
            self._make_room()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            # Other threads may ask CUDA for memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode='thread_local'):
                outputs = self._function(*inputs)
            self._pool = self._pool or graph.pool()
            return _Graph(graph, inputs, outputs, used, torch.cuda.memory_reserved() - before)

    def _make_room(self) -> None:
        limit = MAX_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

        def is_full() -> bool:
            graphs = self._graphs.values()
            return len(graphs) >= MAX_GRAPHS or sum(graph.num_bytes for graph in graphs if graph) > limit

        while self._graphs and is_full():
            self._graphs.popitem(last=False)


class GraphedPrediction:
    """``predict`` of a detector in a CUDA graph; calls that the graph cannot answer exactly go to the class.

    Args:
        model: The detector.
        masks: The form of masks, 'full' or 'rle'.
    """

    def __init__(self, model: nn.Module, masks: str) -> None:
        self._model, self._masks = model, masks
        self._graphs: GraphCache | None = None

    def __reduce__(self) -> tuple:
        # Copies and files capture their own graphs.
        return GraphedPrediction, (self._model, self._masks)

    def __call__(
        self, batch_inputs: Tensor, batch_data_samples: Sequence[DetDataSample], rescale: bool = True
    ) -> Sequence[DetDataSample]:
        samples, found = batch_data_samples, None
        # Graphs and kernels run on the current device, even if their tensors are on another one.
        with torch.cuda.device_of(batch_inputs):
            if self._is_for_graph(batch_inputs, samples, rescale):
                found = self._detect(batch_inputs, samples)
            if found is None:
                return type(self._model).predict(self._model, batch_inputs, samples, rescale)
        return self._model.add_pred_to_datasample(samples, [found])

    def _is_for_graph(self, image: Tensor, samples: Sequence[DetDataSample], rescale: bool) -> bool:
        is_single = len(image) == len(samples) == 1 and 'proposals' not in samples[0]
        return is_single and rescale and _may_replay(self._model, image)

    def _detect(self, image: Tensor, samples: Sequence[DetDataSample]) -> InstanceData | None:
        if self._graphs is None:
            static = StaticDetector(self._model, fused=True)
            # Other threads take self._graphs as the sign that all is ready, so that it comes last.
            self._settings = static.settings
            self._graphs = GraphCache(partial(_run_static, static))
        meta = samples[0].metainfo
        frame = torch.tensor(Frame.numbers(meta)).pin_memory()
        outputs = self._graphs(image, frame, settings=(self._settings(), _address(self._model)))
        if outputs is None:
            return None
        summary, boxes, scores, labels, *masks = outputs
        count, exact = summary.tolist()
        if not exact:
            return None
        found = InstanceData(bboxes=boxes[:count], scores=scores[:count], labels=labels[:count])
        if masks:
            threshold = self._model.roi_head.test_cfg.mask_thr_binary
            paste = box_kernels.paste_masks if self._masks == 'full' else partial(paste_masks, form='rle')
            found.masks = paste(masks[0][:count], found.bboxes, meta['ori_shape'][:2], threshold)
        return found


def _run_static(static: Callable, image: Tensor, frame: Tensor) -> tuple[Tensor, ...]:
    found = static(image, Frame(*frame))
    summary = torch.stack([(found.scores > EMPTY).sum(), found.exact.long()])
    return tuple(x for x in (summary, found.boxes, found.scores, found.labels, found.masks) if x is not None)


class GraphedFeatures:
    """``extract_feat`` of a detector in a CUDA graph, where the heads cannot be in one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._graphs = GraphCache(lambda image: tuple(type(model).extract_feat(model, image)))

    def __reduce__(self) -> tuple:
        return GraphedFeatures, (self._model,)

    def __call__(self, batch_inputs: Tensor) -> tuple[Tensor, ...]:
        features = None
        with torch.cuda.device_of(batch_inputs):
            if _may_replay(self._model, batch_inputs):
                features = self._graphs(batch_inputs, settings=_address(self._model))
            return type(self._model).extract_feat(self._model, batch_inputs) if features is None else features


def _may_replay(model: nn.Module, image: Tensor) -> bool:
    """Whether a graph computes what the model itself would compute in this call."""
    return (
        image.is_cuda
        and not model.training
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled('cuda')
        # A dispatch mode watches operators, and a graph launches kernels without them.
        and _get_current_dispatch_mode() is None
        and not torch.compiler.is_compiling()
    )


def _address(model: nn.Module) -> int:
    """Address of the weights: the graphs of a model that has moved would read the old address."""
    return next(model.parameters()).data_ptr()


def use_graphs(model: nn.Module, masks: str) -> None:
    """Lets a deployed detector on a GPU predict in CUDA graphs, or extract features if its heads cannot be in one."""
    try:
        if kernels.triton is None:
            raise Unsupported('this PyTorch comes without Triton')
        StaticDetector(model)
        model.predict = GraphedPrediction(model, masks)
    except Unsupported as reason:
        MMLogger.get_current_instance().info(
            f'deployed {type(model).__name__}: a CUDA graph has backbone and neck, not the heads: {reason}'
        )
        model.extract_feat = GraphedFeatures(model)
