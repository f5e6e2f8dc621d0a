"""DistilledDetector: learns the feature maps, dense outputs and outputs on boxes of another detector."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import RPNHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from mmdet.models.utils import reweight_loss_dict
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import Tensor, nn

from slab_det.checkpoints import build_detector
from slab_det.common.errors import ConversionError
from slab_det.common.modules import evaluating, given_features
from slab_det.common.tensors import tensors_in

# Boxes per image on which box heads are compared, and surest detections per image on which mask heads are.
NUM_PROPOSALS, NUM_DETECTIONS = 128, 6
# Weights of the losses whose weight is not 1.
FEATURE_WEIGHT, CLASS_WEIGHT, MASK_WEIGHT = 5.0, 3.0, 3.0
# The weight of a box without an object beside one with an object, which has the weight 1.
BACKGROUND = 0.1


class Distillation:
    """Losses that compare a student with its teacher: more where the teacher is surer that there is an object.

    Logits are compared by the divergence of the student's probabilities q from the teacher's p, ``KL(p, q)``, other
    outputs s and t by the error ``sum w (s - t)^2 / sum w t^2``. Each is 0 where student and teacher are equal.

    - ``loss_features``: the error of the feature maps that ``extract_feat`` returns, with w = 1. Absent if they lost
      channels: a map that lost some holds combinations of the teacher's channels, which the heads read otherwise.
    - ``loss_dense``: the divergence of the logits of the RPN or of a dense head, over the sum of p, which is the number
      of objects that the teacher sees; and ``loss_dense_boxes``: the error of its other outputs, where w of a position
      is its highest p.
    - ``loss_roi``: on the teacher's proposals, the divergence of the classes of each stage of the box heads, and
      ``loss_roi_boxes``: the error of their deltas, with the probability of an object as w.
    - ``loss_masks``: the divergence of the masks of the teacher's surest detections, for their classes, weighted by
      their scores.

    RoI heads are compared if they are a StandardRoIHead or a CascadeRoIHead; other heads, such as DETR's, are not.
    Heads of the student run in eval mode, because some return other outputs in training mode.

    Args:
        teacher: A detector; it is set to eval mode and gets no gradient.
    """

    def __init__(self, teacher: nn.Module) -> None:
        teacher.eval()
        self.teacher = teacher

    def __call__(
        self, student: nn.Module, features: Sequence[Tensor], images: Tensor, samples: list[DetDataSample]
    ) -> dict[str, Tensor]:
        """Computes the weighted losses.

        Args:
            student: A detector with the heads of the teacher.
            features: Feature maps that the student's ``extract_feat`` returns for the images.
            images: (B, 3, H, W), as the data preprocessor returns them.
            samples: One for each image, with its shapes; labels are not read.

        Raises:
            ConversionError: If nothing can be compared.
        """
        teacher, weight = self.teacher, next(student.parameters())
        own = next(teacher.parameters())
        if (own.device, own.dtype) != (weight.device, weight.dtype):
            teacher.to(weight.device, weight.dtype)
        with torch.no_grad():
            targets = teacher.extract_feat(images)
        losses, name = {}, _find_dense_head(teacher)
        if all(map_.shape == target.shape for map_, target in zip(features, targets, strict=True)):
            errors = [_weighted_error([map_], [target], [1.0]) for map_, target in zip(features, targets, strict=True)]
            losses['loss_features'] = FEATURE_WEIGHT * torch.stack(errors).mean()
        elif name is None:
            raise ConversionError(
                f'{type(teacher).__name__}: the feature maps of student and teacher have different channels, and its '
                'heads are not compared: there is nothing to learn from; leave the channels of the neck as they are'
            )
        if name:
            with torch.no_grad():
                wanted = getattr(teacher, name)(targets)
            head = getattr(student, name)
            with evaluating(head):
                losses.update(_compare_dense(head(features), wanted))
        if name == 'rpn_head' and _find_stages(getattr(teacher, 'roi_head', None)):
            metas = [sample.metainfo for sample in samples]
            with torch.no_grad():
                proposals = teacher.rpn_head.predict_by_feat(*wanted, batch_img_metas=metas, rescale=False)
                # Sorted by score. All proposals would cost more than the rest of both detectors.
                proposals = [found[:NUM_PROPOSALS] for found in proposals]
            with evaluating(student.roi_head):
                losses.update(_compare_boxes(teacher.roi_head, targets, student.roi_head, features, proposals))
                if teacher.roi_head.with_mask:
                    with torch.no_grad():
                        found = teacher.roi_head.predict_bbox(
                            targets, metas, proposals, teacher.roi_head.test_cfg, rescale=False
                        )
                        found = [part[:NUM_DETECTIONS] for part in found]
                    losses.update(_compare_masks(teacher.roi_head, targets, student.roi_head, features, found))
        return losses

    def __deepcopy__(self, memo: dict) -> Distillation:
        # The teacher is not trained: copies of a student, such as EMAHook's, share it. So it moves to the student that
        # computes a loss, and not with each copy that moves.
        return self


@MODELS.register_module()
def DistilledDetector(  # noqa: N802 (a config's type)
    student: dict, teacher: dict, teacher_checkpoint: str, task_weight: float = 1.0
) -> nn.Module:
    """Builds a detector that learns from another one as well as from labels.

    The result is the student with another ``loss``; its checkpoints load into the student's config. The teacher is not
    a submodule: the next loss moves it to the student's device, it stays in eval mode, and it is not saved in
    checkpoints. Drop-path of the student is off, because the teacher runs without it.

    Args:
        student: Config of the detector to train; its weights come from a checkpoint (``load_from``).
        teacher: Config of the detector to learn from.
        teacher_checkpoint: The teacher's weights, all of them.
        task_weight: Weight of the student's own losses; with 0 no labels are read, and DDP needs
            ``find_unused_parameters`` where heads are not compared.

    Raises:
        CheckpointError: If the teacher's checkpoint is missing or does not fit.
    """
    detector = MODELS.build(copy.deepcopy(student))
    scope = DefaultScope.get_current_instance()
    teacher_cfg = dict(model=copy.deepcopy(teacher), default_scope=scope.scope_name if scope else 'mmdet')
    reference = build_detector(Config(teacher_cfg), teacher_checkpoint).requires_grad_(False)
    for module in detector.modules():
        # DropPath of mmcv and DropPath of timm both have this attribute.
        if hasattr(module, 'drop_prob'):
            module.drop_prob = 0.0
    # Only afterwards: what builds a student may be a function, as FusedDetector is.
    kind = type(detector)
    detector.__class__ = type(f'Distilled{kind.__name__}', (_Distilled, kind), {})
    detector.distillation, detector.task_weight = Distillation(reference), task_weight
    return detector


class _Distilled:
    """Methods that :func:`DistilledDetector` puts before the student's own."""

    def loss(self, batch_inputs: Tensor, batch_data_samples: list[DetDataSample]) -> dict:
        features = self.extract_feat(batch_inputs)
        losses = self.distillation(self, features, batch_inputs, batch_data_samples)
        if self.task_weight > 0:
            # The student's own loss would compute the same feature maps again.
            with given_features(self, features):
                task = super().loss(batch_inputs, batch_data_samples)
            losses.update(reweight_loss_dict(task, self.task_weight))
        return losses


def _find_dense_head(model: nn.Module) -> str | None:
    """The name of the RPN or dense head; None if the detector has neither."""
    if isinstance(getattr(model, 'rpn_head', None), RPNHead):
        return 'rpn_head'
    return 'bbox_head' if isinstance(getattr(model, 'bbox_head', None), BaseDenseHead) else None


def _find_stages(head: nn.Module | None) -> list[tuple[int, ...]]:
    """The first arguments with which the methods of a RoI head run each of its stages; none for an unknown head."""
    if isinstance(head, StandardRoIHead):
        return [()]
    # Its subclasses in mmdet take other arguments.
    return [(stage,) for stage in range(head.num_stages)] if type(head) is CascadeRoIHead else []


def _compare_dense(outputs: Sequence, targets: Sequence) -> dict[str, Tensor]:
    """``loss_dense`` and ``loss_dense_boxes`` of the outputs of a dense head: the logits of each level come first."""
    (logits, *others), (wanted, *rest) = map(_maps_of, (outputs, targets))
    weights = [target.sigmoid() for target in wanted]
    divergence = sum(_bernoulli_divergence(*pair).sum() for pair in zip(logits, wanted, strict=True))
    losses = dict(loss_dense=divergence / sum(p.sum() for p in weights))
    if others:
        weights = [p.amax(1, keepdim=True) for p in weights]
        errors = [_weighted_error(*maps, weights) for maps in zip(others, rest, strict=True)]
        losses['loss_dense_boxes'] = torch.stack(errors).mean()
    return losses


def _maps_of(outputs: Sequence) -> list[list[Tensor]]:
    """The maps of each kind of output of a dense head, without kinds that it leaves out."""
    kinds = ([*map(_in_float, tensors_in(kind))] for kind in outputs)
    return [maps for maps in kinds if maps]


def _compare_boxes(
    teacher: nn.Module, targets: Sequence[Tensor], student: nn.Module, features: Sequence[Tensor], boxes: list
) -> dict[str, Tensor]:
    """``loss_roi`` and ``loss_roi_boxes``; see :class:`Distillation`."""
    rois, divergences, errors = bbox2roi([found.bboxes for found in boxes]), [], []
    for stage in _find_stages(teacher):
        with torch.no_grad():
            wanted = teacher._bbox_forward(*stage, targets, rois)
            p = _in_float(wanted['cls_score']).softmax(1)
        found = student._bbox_forward(*stage, features, rois)
        objects = 1 - p[:, -1]
        weight = BACKGROUND + (1 - BACKGROUND) * objects
        logs = p.clamp(min=torch.finfo(p.dtype).tiny).log() - _in_float(found['cls_score']).log_softmax(1)
        # Without proposals all tensors are empty. Their sum is 0 and keeps the graph that DDP needs.
        divergences.append((weight * (p * logs).sum(1)).sum() / weight.sum().clamp(min=BACKGROUND))
        # A head may predict buckets beside deltas, also by sides of a box.
        own, deltas = tensors_in(found['bbox_pred']), tensors_in(wanted['bbox_pred'])
        weights = [objects.repeat_interleave(len(part) // max(1, len(objects))) for part in deltas]
        weights = [w.reshape(-1, *[1] * (part.ndim - 1)) for w, part in zip(weights, deltas, strict=True)]
        errors.append(_weighted_error(own, deltas, weights))
    loss = CLASS_WEIGHT * torch.stack(divergences).mean()
    return dict(loss_roi=loss, loss_roi_boxes=torch.stack(errors).mean())


def _compare_masks(
    teacher: nn.Module, targets: Sequence[Tensor], student: nn.Module, features: Sequence[Tensor], found: list
) -> dict[str, Tensor]:
    """``loss_masks``; see :class:`Distillation`."""
    rois = bbox2roi([part.bboxes for part in found])
    labels, scores = (torch.cat([part[key] for part in found]) for key in ('labels', 'scores'))
    losses = []
    for stage in _find_stages(teacher):
        with torch.no_grad():
            wanted = teacher._mask_forward(*stage, targets, rois)['mask_preds']
        masks = student._mask_forward(*stage, features, rois)['mask_preds']
        # A head that does not tell classes apart has one mask.
        some = torch.arange(len(labels), device=labels.device), labels if masks.shape[1] > 1 else 0 * labels
        divergence = _bernoulli_divergence(_in_float(masks[some]), _in_float(wanted[some])).mean((1, 2))
        weight = _in_float(scores)
        losses.append((weight * divergence).sum() / weight.sum().clamp(min=BACKGROUND))
    return dict(loss_masks=MASK_WEIGHT * torch.stack(losses).mean())


def _bernoulli_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """``KL(p, q)`` of each element, with the probabilities p and q of the target's and of these logits."""
    p = target.sigmoid()
    # BCE - entropy, in logits.
    return F.softplus(logits) - F.softplus(target) - p * (logits - target)


def _weighted_error(outputs: Sequence[Tensor], targets: Sequence[Tensor], weights: Sequence[Tensor | float]) -> Tensor:
    """``sum w (s - t)^2 / sum w t^2`` over tensors."""
    error = square = 0.0
    for output, target, weight in zip(outputs, targets, weights, strict=True):
        target = _in_float(target)
        error = error + (weight * (_in_float(output) - target).square()).sum()
        square = square + (weight * target.square()).sum()
    return error / square.clamp(min=torch.finfo(square.dtype).tiny)


def _in_float(tensor: Tensor) -> Tensor:
    """In float32 at least: sums of squares overflow half precision."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
