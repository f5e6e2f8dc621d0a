"""DistilledDetector: learns the feature maps, dense outputs and outputs on boxes of another detector."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from mmdet.models.dense_heads import RPNHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from mmdet.models.utils import reweight_loss_dict
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.structures import InstanceData
from torch import Tensor, nn

from slab_det.checkpoints import build_detector
from slab_det.common.errors import ConversionError
from slab_det.common.modes import evaluating
from slab_det.common.tensors import tensors_in

# Boxes per image on which RoI heads are compared.
NUM_PROPOSALS = 100
# The weight of loss_features; the other losses have weight 1.
FEATURE_WEIGHT = 5.0


class Distillation:
    """Losses that compare a student with its teacher.

    The error of outputs s of the student against outputs t of the teacher is ``sum (s - t)^2 / sum t^2``: 0 where they
    are equal, 1 where s is zero. Each loss is the mean error of its tensors:

    - ``loss_features``: the feature maps that ``extract_feat`` returns. Absent if they lost channels: a map that lost
      some holds combinations of the teacher's channels, which the heads read otherwise.
    - ``loss_dense``: logits and deltas of the RPN, or all outputs of a dense head.
    - ``loss_roi``: logits and deltas of a StandardRoIHead, or of each stage of a CascadeRoIHead, on the teacher's
      proposals, and masks on 100 proposals.

    Other heads, such as DETR's, are not compared. Heads of the student run in eval mode, because some return other
    outputs in training mode.

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
            losses['loss_features'] = FEATURE_WEIGHT * mean_relative_error(features, targets)
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
                losses['loss_dense'] = mean_relative_error(head(features), wanted)
        if name == 'rpn_head' and _find_stages(getattr(teacher, 'roi_head', None)):
            with torch.no_grad():
                metas = [sample.metainfo for sample in samples]
                proposals = teacher.rpn_head.predict_by_feat(*wanted, batch_img_metas=metas, rescale=False)
                # Sorted by score. All proposals would cost more than the rest of both detectors.
                proposals = [found[:NUM_PROPOSALS] for found in proposals]
                wanted = _roi_outputs(teacher.roi_head, targets, proposals)
            with evaluating(student.roi_head):
                outputs = _roi_outputs(student.roi_head, features, proposals)
            losses['loss_roi'] = mean_relative_error(outputs, wanted)
        return losses

    def __deepcopy__(self, memo: dict) -> Distillation:
        # The teacher is not trained: copies of a student, such as EMAHook's, share it. So it moves to the student that
        # computes a loss, and not with each copy that moves.
        return self


def mean_relative_error(outputs: object, targets: object) -> Tensor:
    """The mean of ``sum (s - t)^2 / sum t^2``, in float32 at least, over tensors in tuples, lists and dicts."""
    outputs, targets = tensors_in(outputs), tensors_in(targets)
    errors = []
    for output, target in zip(outputs, targets, strict=True):
        if target.numel():
            # A sum of squares overflows half precision.
            output, target = (t if t.dtype == torch.float64 else t.float() for t in (output, target))
            smallest = torch.finfo(target.dtype).tiny
            errors.append((output - target).square().sum() / target.square().sum().clamp(min=smallest))
    if errors:
        return torch.stack(errors).mean()
    # Without proposals all tensors are empty. Their sum is 0 and keeps the graph that DDP needs.
    return sum(output.sum() for output in outputs)


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
            self.extract_feat = lambda *_: features
            try:
                task = super().loss(batch_inputs, batch_data_samples)
            finally:
                del self.extract_feat
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


def _roi_outputs(
    head: StandardRoIHead | CascadeRoIHead, features: Sequence[Tensor], proposals: list[InstanceData]
) -> list[Tensor]:
    outputs, rois = [], bbox2roi([found.bboxes for found in proposals])
    # StandardRoIHead.forward would take the first 100 boxes, all from the first image.
    surest = bbox2roi([found.bboxes[: max(1, NUM_PROPOSALS // len(proposals))] for found in proposals])
    for stage in _find_stages(head):
        boxes = head._bbox_forward(*stage, features, rois)
        outputs += [boxes['cls_score'], boxes['bbox_pred']]
        if head.with_mask:
            outputs.append(head._mask_forward(*stage, features, surest)['mask_preds'])
    return outputs
