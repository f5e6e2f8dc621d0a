"""The interface of a family of heads: what CUDA graphs, ONNX files and absorption know of the heads of a detector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData
from torch import Tensor, nn

from slab_det.common.config import type_name
from slab_det.common.errors import ExportError
from slab_det.families.constants import constant
from slab_det.families.masks import enlarge_masks
from slab_det.families.operators import EMPTY, BoxOperators
from slab_det.families.regions import Regions

# The methods by which a dense head predicts: a subclass may override any other method.
DENSE_PREDICTION = 'predict', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process'
# The NMS options that a config may have; split_thr changes no result.
NMS_OPTIONS = {'type', 'iou_threshold', 'split_thr', 'class_agnostic', 'offset'}


class Unsupported(ExportError):
    """A detector with a part that no graph can compute; the message names the part."""


class Frame(NamedTuple):
    """The frame of an image, each tensor for x, y, x, y: (4,).

    Attributes:
        limits: Width and height, without padding.
        scale: The factors from the original image; None leaves boxes in the pixels of this image.
        rescale: The factors back, rounded as in mmdet.
        padded: Height and width, with padding.
    """

    limits: Tensor
    scale: Tensor | None = None
    rescale: Tensor | None = None
    padded: tuple[int, int] | None = None

    def find_padding(self, feature: Tensor) -> Tensor:
        """Whether each pixel of a map (1, C, h, w) is padding, (1, h, w): queries do not attend to these."""
        sides = zip(feature.shape[2:], self.padded, strict=True)
        rows, columns = (nearest_pixels(*side, feature.device) for side in sides)
        return ((rows >= self.limits[1])[:, None] | (columns >= self.limits[0]))[None]


@constant(256)
def nearest_pixels(side: int, padded: int, device: torch.device) -> Tensor:
    """Returns the pixel of an image, along one axis, that each pixel of a map has by nearest interpolation, (side,)."""
    return F.interpolate(torch.arange(padded, dtype=torch.float32, device=device)[None, None], side)[0, 0]


class Objects(NamedTuple):
    """The objects in one image, best first.

    Attributes:
        corners: (n, 4).
        scores: (n,), ``EMPTY`` in empty slots.
        labels: (n,).
        exact: Whether ``predict`` of the detector finds the same; None if the operators have no empty slots.
        mask_logits: (n, 28, 28) of each stage, whose probabilities have a mean; none for a family without masks. With a
            ``mask_stride``, one tensor (n, h, w).
    """

    corners: Tensor
    scores: Tensor
    labels: Tensor
    exact: Tensor | None
    mask_logits: tuple[Tensor, ...] = ()

    def mask_probabilities(self) -> Tensor:
        """Returns the mean of the probabilities of all stages, (n, 28, 28)."""
        first, *others = (logits.sigmoid() for logits in self.mask_logits)
        return torch.stack([first, *others]).mean(0) if others else first

    def mean_mask_logits(self) -> Tensor:
        """Returns the logits of :meth:`mask_probabilities`, (n, 28, 28); large ones do not overflow."""
        if len(self.mask_logits) == 1:
            return self.mask_logits[0]
        logits = torch.stack(self.mask_logits)
        # log p - log (1 - p), of p = mean(sigmoid(logits)): a mean of exponentials, relative to the largest.
        logs = F.logsigmoid(logits), F.logsigmoid(-logits)
        inside, outside = (top + (x - top).exp().mean(0).log() for x in logs for top in (x.amax(0),))
        return inside - outside


class Family(ABC):
    """A family of heads, in the operators that a CUDA graph has.

    A subclass checks in ``__init__`` that the detector predicts as its class of mmdet does.

    Args:
        detector: The detector, whose modules run.
        operators: The operators on boxes.

    Attributes:
        base: The class of mmdet whose ``predict`` the detectors of this family have.
        part: The part of a detector that tells its family, such as 'roi_head' or 'bbox_head'.
        heads: The classes of mmdet as one of which this part predicts.
        absorbed: The exact classes of this part that :meth:`run_heads` runs; absorption then removes their channels.

    Raises:
        Unsupported: If a part of the detector computes something that the family does not.
    """

    base: ClassVar[type[nn.Module]]
    part: ClassVar[str]
    heads: ClassVar[tuple[type[nn.Module], ...]]
    absorbed: ClassVar[tuple[type[nn.Module], ...]] = ()

    def __init__(self, detector: nn.Module, operators: BoxOperators) -> None:
        self.detector, self.operators = detector, operators

    @classmethod
    def absorbs(cls, detector: nn.Module) -> bool:
        """Whether :meth:`find_regions` and :meth:`run_heads` know the heads of ``detector``."""
        # A subclass may read the maps elsewhere.
        return isinstance(detector, cls.base) and type(getattr(detector, cls.part, None)) in cls.absorbed

    @classmethod
    def find_regions(
        cls, detector: nn.Module, images: Tensor, samples: Sequence[DetDataSample], share: float
    ) -> Regions:
        """Finds the regions of a batch (B, 3, H, W), in pixels of ``images``.

        Args:
            detector: A detector of this family.
            images: The images.
            samples: Their shapes.
            share: This share of ``PROPOSALS`` and of ``DETECTIONS`` (:mod:`slab_det.families.regions`) is the most
                that the heads read of an image; infinite for all that they read in a test.
        """
        raise NotImplementedError

    @classmethod
    def run_heads(cls, detector: nn.Module, maps: Sequence[Tensor], regions: Regions) -> None:
        """Runs the heads on the maps of the neck."""
        raise NotImplementedError

    def check_fixed(self) -> None:
        """Raises :class:`Unsupported` unless operators of fixed shapes compute what the detector does."""
        # Where they compute every detector of the family.
        return

    def merge_weights(self) -> None:
        """Makes the heads run with copies of their weights, merged so that they need fewer kernels."""
        # A family without a method of its own has one way to run its heads.
        return

    @property
    @abstractmethod
    def test_cfgs(self) -> tuple[dict, ...]:
        """The ``test_cfg`` of each part that has one; a graph is captured again when one of them changes."""

    def run(self, image: Tensor, frame: Tensor) -> tuple[Tensor, ...]:
        """Computes from an image (1, 3, H, W), normalised and padded, what :meth:`predict` makes predictions from.

        Args:
            image: The image.
            frame: The first three values of its :class:`Frame`, (3, 4).
        """
        return self.compute(self.detector.extract_feat(image), Frame(*frame, padded=tuple(image.shape[2:])))

    @abstractmethod
    def compute(self, features: Sequence[Tensor], frame: Frame) -> tuple[Tensor, ...]:
        """Computes tensors of fixed shapes from the feature maps of an image, without waiting for the GPU."""

    @abstractmethod
    def predict(self, computed: Sequence[Tensor], metainfo: dict, paste: Callable[..., Any]) -> Any:
        """Makes the predictions of an image from what :meth:`compute` returned.

        Args:
            computed: Result of :meth:`compute`.
            metainfo: Of the image.
            paste: Pastes masks that fill their boxes; see :func:`slab_det.families.masks.paste_masks`.

        Returns:
            What ``add_pred_to_datasample`` of the detector takes; None if ``predict`` of the detector may find others.
        """


class BoxFamily(Family):
    """A family whose detectors find boxes, with masks or without.

    Attributes:
        name: Stands in exported files.
        stored: For each part of ``test_cfg`` ('' is ``test_cfg`` itself) the settings that change detections, with
            mmdet's defaults. An exported file stores them. The last part makes the detections.
        lowers_scores: Whether objects may have lower scores than ``score_thr``, by factors that come after it.
        predictors: Names of the last layers, which predict boxes and masks: an int8 file keeps them in float32.
    """

    name: ClassVar[str]
    stored: ClassVar[dict[str, dict[str, Any]]]
    predictors: ClassVar[tuple[str, ...]]
    lowers_scores: ClassVar[bool] = False

    @abstractmethod
    def detect(self, features: Sequence[Tensor], frame: Frame, score_thr: float | Tensor) -> Objects:
        """Detects the objects of an image in its feature maps; drops those with a score up to ``score_thr``."""

    def compute(self, features: Sequence[Tensor], frame: Frame) -> tuple[Tensor, ...]:
        """Detects the objects of an image; the first ``count`` of the n returned rows are objects.

        Returns:
            Integers (count, exact); exact is 0 if ``predict`` of the detector may find other objects. Then, best first:
            corners in the original image (n, 4), scores (n,), labels (n,) and, with masks, their probabilities
            (n, 28, 28), or with a ``mask_stride`` of the family their logits (n, h, w).
        """
        found = self.detect(features, frame, self.score_thr)
        masks = found.mask_logits
        if masks and self.mask_stride is None:
            masks = (found.mask_probabilities(),)
        summary = torch.stack([(found.scores > EMPTY).sum(), found.exact.long()])
        return summary, found.corners, found.scores, found.labels, *masks

    def predict(self, computed: Sequence[Tensor], metainfo: dict, paste: Callable[..., Any]) -> InstanceData | None:
        summary, boxes, scores, labels, *masks = computed
        count, exact = summary.tolist()
        if not exact:
            return None
        found = InstanceData(bboxes=boxes[:count], scores=scores[:count], labels=labels[:count])
        shape = metainfo['ori_shape'][:2]
        if masks and self.mask_stride is not None:
            settings = self.mask_stride, metainfo['scale_factor'], shape, self.mask_threshold
            found.masks = enlarge_masks(masks[0][:count], *settings)
        elif masks:
            found.masks = paste(masks[0][:count], found.bboxes, shape, self.mask_threshold)
        return found

    def choose(
        self, scores: Tensor, corners: Tensor, label_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Applies NMS per class to boxes (N, 4) with scores (N,), and returns the best boxes of all classes.

        Args:
            scores: (N,), ``EMPTY`` in empty slots.
            corners: (N, 4).
            label_of: Returns the labels of the boxes with these indices.

        Returns:
            Corners, scores, labels, whether mmdet would return the same (see :class:`Objects`), and the
            indices among the N boxes.
        """
        cfg, operators = self.test_cfgs[-1], self.operators
        corners, scores, index, stride, enough = operators.candidates(scores, corners)
        label, limit, iou_threshold = label_of(index), cfg['max_per_img'], cfg['nms']['iou_threshold']
        scores, kept = operators.suppress(corners[None], scores[None], label[None], stride, iou_threshold, limit)
        if enough is not None:
            if limit == len(scores):
                # If the candidates fill all slots, worse boxes cannot change the result.
                enough = enough | (scores > EMPTY).all()
            # If any coordinate is NaN, mmcv suppresses no box.
            enough = enough & stride.isfinite()
        return corners[kept], scores, label[kept], enough, index[kept]

    @property
    def has_masks(self) -> bool:
        return False

    @property
    def mask_stride(self) -> int | None:
        """Pixels of the padded image per pixel of the masks; None for masks that fill their boxes."""
        return None

    @property
    def score_thr(self) -> float:
        return self.test_cfgs[-1]['score_thr']

    @property
    def mask_threshold(self) -> float:
        """A pixel is inside a mask from this probability on; with a ``mask_stride`` only above it."""
        return self.test_cfgs[-1]['mask_thr_binary']


def nearest_base(part: object, bases: Iterable[type]) -> type | None:
    """Returns the class in ``bases`` that ``part`` is an instance of; of two such classes, the derived one."""
    return next((base for base in type(part).__mro__ if base in bases), None)


def find_part(owner: nn.Module, name: str, base: type, methods: Iterable[str] = ()) -> Any:
    """Returns a part of ``owner``; raises :class:`Unsupported` if it is no ``base`` or overrides one of ``methods``."""
    part = getattr(owner, name, None)
    check_part(part, name, base, methods)
    return part


def check_part(part: object, name: str, base: type, methods: Iterable[str] = ()) -> None:
    """Raises :class:`Unsupported` unless ``part`` is a ``base`` that overrides none of ``methods``."""
    same = (getattr(type(part), method) is getattr(base, method) for method in methods)
    if not isinstance(part, base) or not all(same):
        raise Unsupported(f'a graph needs {base.__name__} as {name}, not {type(part).__name__}')


def require(what: str, given: bool) -> None:
    """Raises :class:`Unsupported` unless the detector has what a graph needs."""
    if not given:
        raise Unsupported(f'a graph of detections needs {what}')


def check_nms(name: str, cfg: dict) -> None:
    """Raises :class:`Unsupported` unless a head with this ``test_cfg`` suppresses boxes as the operators do."""
    nms = cfg.get('nms') or {}
    plain = type_name(nms.get('type', 'nms')) == 'nms' and not nms.get('class_agnostic') and not nms.get('offset')
    known = {'iou_threshold'} <= {*nms} <= NMS_OPTIONS
    require(f'plain NMS per class in the test_cfg of the {name}', plain and known)


def check_deltas(head: nn.Module) -> None:
    """Raises :class:`Unsupported` unless a head decodes deltas as the operators do."""
    coder = find_part(head, 'bbox_coder', DeltaXYWHBBoxCoder, ('decode',))
    require('bbox_coders without add_ctr_clamp', not coder.add_ctr_clamp)
