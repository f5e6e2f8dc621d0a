"""Runs a deployed detector in CUDA graphs, one graph per image size; each holds the detector on fixed shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.common.errors import name_error
from slab_det.common.tensors import tensors_in
from slab_det.families import Family, Unsupported, find_family, require
from slab_det.families.constants import used_constants
from slab_det.families.masks import paste_masks
from slab_det.families.operators import BoxOperators
from slab_det.inference.gpu import kernels, mask_kernels
from slab_det.inference.gpu.box_kernels import FixedOperators

# The most graphs that a GraphCache keeps, and the largest share of the GPU's memory that these graphs may take before
# another is captured. The graphs of a cache share one memory pool, because they never run at the same time.
MAX_GRAPHS, MAX_SHARE = 64, 0.25
# A capture may fail for a moment, as without free memory: how often a size is tried, and after how many calls again.
MAX_TRIES, RETRY_AFTER = 3, 100
# Captures take turns, because PyTorch captures all graphs of a process on one shared stream.
_capturing = Lock()


@dataclass(frozen=True)
class _Graph:
    """A captured graph, its static tensors, what else it reads, and the bytes of both outside of the memory pool."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    reads: list
    num_bytes: int


@dataclass
class _Failure:
    """A capture that failed ``tries`` times, and the number of calls since the last time."""

    tries: int = 0
    calls: int = 0


class GraphCache:
    """Captures a function of tensors in CUDA graphs; a replay launches all kernels without running Python.

    Captures one graph for each combination of input shapes and ``settings``, in about a tenth of a second. Beyond
    ``MAX_GRAPHS``, drops the least recently used graph; beyond ``MAX_SHARE`` all graphs, because their common memory is
    free only then. Threads and streams take turns. A capture that failed is tried again after ``RETRY_AFTER`` calls,
    ``MAX_TRIES`` times in all.

    Args:
        function: Returns a tuple of tensors, and must not wait for the GPU.
        model: The module that the function runs. Each graph keeps the memory of the weights that it reads, even after
            the model has moved: no later weight gets an address that an old graph knows.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], model: nn.Module | None = None) -> None:
        self._function, self._model, self._lock = function, model, Lock()
        self._graphs: OrderedDict[Hashable, _Graph | _Failure] = OrderedDict()
        self._pool: tuple[int, int] | None = None
        self._done: torch.cuda.Event | None = None

    def __call__(self, *inputs: Tensor, settings: Hashable = ()) -> tuple[Tensor, ...] | None:
        """Returns copies of the function's results, or None if the function cannot be captured.

        Args:
            *inputs: Tensors on the GPU, or pinned tensors, which are copied to the GPU.
            settings: Everything else that the results depend on; each value has its own graphs.
        """
        key = settings, tuple((x.shape, x.dtype, x.device) for x in inputs)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            found = self._graphs.get(key) or _Failure(calls=RETRY_AFTER)
            if isinstance(found, _Failure):
                if found.calls >= RETRY_AFTER and found.tries < MAX_TRIES:
                    found = self._try_capture(inputs, found.tries + 1)
                else:
                    found.calls += 1
            self._graphs[key] = found
            self._graphs.move_to_end(key)
            if isinstance(found, _Failure):
                return None
            stream = torch.cuda.current_stream()
            if self._done is not None:
                # The lock orders launches; on another stream the last replay may still run.
                stream.wait_event(self._done)
            for static, given in zip(found.inputs, inputs, strict=True):
                static.copy_(given, non_blocking=True)
            found.graph.replay()
            # The next replay, from any thread, overwrites the outputs.
            outputs = tuple(output.clone() for output in found.outputs)
            self._done = stream.record_event()
            return outputs

    def _try_capture(self, inputs: tuple[Tensor, ...], tries: int) -> _Graph | _Failure:
        try:
            return self._capture(inputs)
        except Exception as error:
            shapes = ', '.join('x'.join(map(str, x.shape)) for x in inputs)
            again = f', until the next try after {RETRY_AFTER} of them' if tries < MAX_TRIES else ''
            MMLogger.get_current_instance().warning(
                f'deployed detector: cannot capture a CUDA graph of inputs of {shapes} ({name_error(error)}); images '
                f'of this size run without a graph, several times slower{again}'
            )
            torch.cuda.synchronize()
            return _Failure(tries)

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Graph:
        device = next(x.device for x in inputs if x.is_cuda)
        # In some versions of PyTorch, a failed capture would leave its own stream as the current one.
        restored = torch.cuda.stream(torch.cuda.current_stream(device))
        with _capturing, torch.cuda.device(device), restored, used_constants() as constants:
            inputs = tuple(torch.empty_like(x, device=device).copy_(x) for x in inputs)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # Warm-up: libraries choose their kernels, Triton compiles its kernels, and constants are made.
                for _ in range(2):
                    self._function(*inputs)
            torch.cuda.current_stream().wait_stream(side)
            self._make_room()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            # 'thread_local' lets other threads allocate CUDA memory during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode='thread_local'):
                outputs = self._function(*inputs)
            self._pool = self._pool or graph.pool()
            weights = [*self._model.parameters(), *self._model.buffers()] if self._model is not None else []
            reads = [*constants, *(weight.detach() for weight in weights)]
            num_bytes = sum(x.nbytes for x in (*inputs, *tensors_in(constants)))
            return _Graph(graph, inputs, outputs, reads, num_bytes)

    def _make_room(self) -> None:
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        if self.num_bytes() > MAX_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory:
            self._graphs.clear()
            self._pool = None

    def num_bytes(self) -> int:
        """Returns the bytes of GPU memory of all graphs, without the weights of the model."""
        graphs = [found for found in self._graphs.values() if isinstance(found, _Graph)]
        return _pool_bytes(self._pool) + sum(graph.num_bytes for graph in graphs)


def _pool_bytes(pool: tuple[int, int] | None) -> int:
    """The bytes of GPU memory in a memory pool."""
    return sum(x['total_size'] for x in torch.cuda.memory_snapshot() if tuple(x['segment_pool_id']) == pool)


def make_family(detector: nn.Module, operators: BoxOperators) -> Family:
    """Makes the family that runs a detector by ``operators``, whose results have fixed shapes.

    Raises:
        Unsupported: If no family of heads computes what the detector does.
    """
    family = find_family(detector)(detector, operators)
    family.check_fixed()
    return family


def measure_frame(metainfo: dict) -> Tensor:
    """Returns the rows of a :class:`Frame`, (3, 4): unpadded size of an image, its scale, and the inverse scale."""
    (height, width), (x, y) = metainfo['img_shape'][:2], metainfo['scale_factor'][:2]
    return torch.tensor([[width, height] * 2, [x, y] * 2, [1 / x, 1 / y] * 2], dtype=torch.float32)


class _Graphed(ABC):
    """Replaces a method of a detector by CUDA graphs of its weights where they are.

    Args:
        model: The detector.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Made at the first call, because copying and loading call __init__ before the model has its modules.
        self._graphs: GraphCache | None = None
        self._address, self._lock = 0, Lock()

    @abstractmethod
    def _make_function(self) -> Callable[..., tuple[Tensor, ...]]:
        """Returns the function to capture; it may have copies of the weights."""

    def _follow_weights(self) -> GraphCache:
        """Returns the graphs, which are new where the weights have moved: a graph reads weights by address."""
        address = next(self._model.parameters()).data_ptr()
        # Threads share a detector: the first one makes the graphs.
        with self._lock:
            if address != self._address:
                # A graph of the weights where they were may still run.
                torch.cuda.synchronize()
                self._graphs, self._address = GraphCache(self._make_function(), self._model), address
            return self._graphs


class GraphedPrediction(_Graphed):
    """Replaces a detector's ``predict`` by a CUDA graph; calls that a graph cannot answer run the original.

    Args:
        model: The detector.
        masks: Format of the predicted masks, 'full' or 'rle'.
    """

    def __init__(self, model: nn.Module, masks: str) -> None:
        super().__init__(model)
        self._masks = masks
        self._family: Family | None = None

    def __reduce__(self) -> tuple:
        # A copied or loaded detector captures its own graphs.
        return GraphedPrediction, (self._model, self._masks)

    def _make_function(self) -> Callable[..., tuple[Tensor, ...]]:
        self._family = make_family(self._model, FixedOperators())
        self._family.merge_weights()
        return self._family.run

    def __call__(
        self, batch_inputs: Tensor, batch_data_samples: Sequence[DetDataSample], rescale: bool = True
    ) -> Sequence[DetDataSample]:
        model, samples = self._model, batch_data_samples
        is_single = len(batch_inputs) == len(samples) == 1 and 'proposals' not in samples[0]
        # Graphs and kernels run on the current device, even if their tensors are on another one.
        with torch.cuda.device_of(batch_inputs):
            if is_single and rescale and _may_replay(model, batch_inputs):
                found = self._detect(batch_inputs, samples[0].metainfo)
                if found is not None:
                    return model.add_pred_to_datasample(samples, [found])
            return type(model).predict(model, batch_inputs, samples, rescale)

    def _detect(self, image: Tensor, metainfo: dict) -> Any:
        """Returns the predictions of a graph, or None if ``predict`` of the class may find others."""
        graphs = self._follow_weights()
        # If the weights move in another thread, it may be the next one, whose settings and predictions are the same.
        family = self._family
        computed = graphs(image, measure_frame(metainfo).pin_memory(), settings=repr(family.test_cfgs))
        paste = mask_kernels.triton_paste_masks if self._masks == 'full' else partial(paste_masks, mask_format='rle')
        return None if computed is None else family.predict(computed, metainfo, paste)


class GraphedFeatures(_Graphed):
    """Replaces ``extract_feat`` of a detector by a CUDA graph, for detectors whose heads cannot be captured."""

    def __reduce__(self) -> tuple:
        return GraphedFeatures, (self._model,)

    def _make_function(self) -> Callable[..., tuple[Tensor, ...]]:
        return lambda image: tuple(type(self._model).extract_feat(self._model, image))

    def __call__(self, batch_inputs: Tensor) -> tuple[Tensor, ...]:
        features = None
        with torch.cuda.device_of(batch_inputs):
            if _may_replay(self._model, batch_inputs):
                features = self._follow_weights()(batch_inputs)
            return type(self._model).extract_feat(self._model, batch_inputs) if features is None else features


def _may_replay(model: nn.Module, image: Tensor) -> bool:
    """Whether a graph computes what the model itself would compute in this call."""
    return image.is_cuda and not model.training and not torch.is_grad_enabled() and kernels.runs_as_written()


def use_graphs(model: nn.Module, masks: str) -> None:
    """Makes a deployed detector on a GPU predict in CUDA graphs, or only extract features if graphs lack its heads."""
    try:
        require('Triton, which this PyTorch lacks', kernels.triton is not None)
        make_family(model, FixedOperators())
        model.predict = GraphedPrediction(model, masks)
    except Unsupported as reason:
        MMLogger.get_current_instance().info(
            f'deployed {type(model).__name__}: a CUDA graph runs backbone and neck, not the heads: {reason}'
        )
        model.extract_feat = GraphedFeatures(model)
