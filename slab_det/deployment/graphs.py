"""CUDA graphs of backbone, neck and RPN head: at batch 1 a GPU waits for launches more than it computes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from slab_det.deployment.heads import RoIFeatures
from slab_det.deployment.size_cache import pin_sizes
from slab_det.runtime.errors import DeploymentError

# Each keeps its activations: at 800x1333 about 1 GB in float32.
MAX_SHAPES = 8
# CUDA libraries choose kernels and allocate workspaces in the first calls, which a graph must not hold.
WARM_UP = 3


class DenseGraph:
    """Backbone, neck and RPN head for images of one shape, captured.

    Args:
        forward: Images to (features, outputs of the RPN head).
        images: The first ones.
    """

    def __init__(self, forward: Callable[[Tensor], tuple], images: Tensor) -> None:
        with torch.inference_mode(False):
            # Written again in other modes than the first.
            self._images = torch.empty_like(images)
        with torch.cuda.device(images.device):
            self._images.copy_(images)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    forward(self._images)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # Another thread may pin memory for a data loader meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode='thread_local'):
                self.features, self.rpn_outputs = forward(self._images)

    def replay(self, images: Tensor) -> None:
        """Computes ``features`` and ``rpn_outputs`` anew, in their places."""
        with torch.cuda.device(images.device):
            self._images.copy_(images)
            self._graph.replay()


class GraphedDetector:
    """Stands in for ``extract_feat`` and the forward of the RPN head of a detector.

    What it returns is overwritten by the next image of the same shape. After ``MAX_SHAPES`` shapes, others run eagerly.

    Args:
        model: A deployed two-stage detector on a GPU.
        roi_features: What its RoI extractors share for an image.
    """

    def __init__(self, model: nn.Module, roi_features: RoIFeatures) -> None:
        self._model, self._roi_features = model, roi_features
        self._extract_feat, self._rpn_forward = model.extract_feat, model.rpn_head.forward
        self._graphs: dict[tuple, DenseGraph | None] = {}
        self._last: DenseGraph | None = None

    def extract_feat(self, images: Tensor) -> Sequence[Tensor]:
        key = tuple(images.shape), images.dtype
        if key not in self._graphs:
            self._graphs[key] = self._capture(images)
        self._last = self._graphs[key]
        if self._last is None:
            return self._extract_feat(images)
        self._roi_features.forget()
        self._last.replay(images)
        return self._last.features

    def rpn_forward(self, features: Sequence[Tensor]) -> Any:
        if self._last is not None and not any(map(operator.is_not, features, self._last.features)):
            return self._last.rpn_outputs
        return self._rpn_forward(features)

    def _capture(self, images: Tensor) -> DenseGraph | None:
        if sum(graph is not None for graph in self._graphs.values()) == MAX_SHAPES:
            print_log(
                f'more than {MAX_SHAPES} input shapes: {tuple(images.shape)} runs without a CUDA graph; raise '
                'data_preprocessor.pad_size_divisor to have fewer',
                'current',
            )
            return None
        graph = DenseGraph(self._dense, images)
        pin_sizes(self._model)
        return graph

    def _dense(self, images: Tensor) -> tuple:
        features = self._extract_feat(images)
        return features, self._rpn_forward(features)


def check_graphs(model: nn.Module) -> None:
    """Raises unless :func:`capture_graphs` can take the model.

    Raises:
        DeploymentError: If the model is no two-stage detector, or not on a GPU.
    """
    if not hasattr(model, 'rpn_head') or not hasattr(model, 'extract_feat'):
        raise DeploymentError(f'cuda_graphs: {type(model).__name__} is no two-stage detector')
    device = next(model.parameters()).device
    if device.type != 'cuda':
        raise DeploymentError(f'cuda_graphs: the model is on {device}; move it to a GPU before slab_det.deploy')


def capture_graphs(model: nn.Module, roi_features: RoIFeatures) -> None:
    """Runs backbone, neck and RPN head of a two-stage detector as CUDA graphs, in place."""
    graphed = GraphedDetector(model, roi_features)
    model.extract_feat, model.rpn_head.forward = graphed.extract_feat, graphed.rpn_forward
