"""Faster and Mask R-CNN: an RPN, and a RoI head of one stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import RPNHead
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead, ConvFCBBoxHead, Shared2FCBBoxHead, Shared4Conv1FCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from torch import Tensor, nn

from slab_det.families.base import (
    DENSE_PREDICTION,
    BoxFamily,
    Frame,
    Objects,
    check_deltas,
    check_nms,
    check_part,
    find_part,
    require,
)
from slab_det.families.channels import tower_channels
from slab_det.families.layers import FusedConv, linear_relu
from slab_det.families.operators import EMPTY, BoxOperators, can_pool, to_rows
from slab_det.families.regions import BEST, DETECTIONS, PROPOSALS, Regions, weigh_positions
from slab_det.norms.folds import Channels, register_folds

# The methods that predict: a subclass may override any other method.
BOX_PREDICTION = 'predict_by_feat', '_predict_by_feat_single', 'regress_by_class'
ROI_PREDICTION = 'predict', 'predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward'
MASK_PREDICTION = 'predict_by_feat', '_predict_by_feat_single'


class TwoStage(BoxFamily):
    """See :class:`BoxFamily`. Proposals are the best anchors of each level; objects, the best classes of proposals."""

    name = 'two_stage'
    base = TwoStageDetector
    part = 'roi_head'
    heads = absorbed = (StandardRoIHead,)
    stored = {
        'rpn': dict(nms_pre=-1, min_bbox_size=-1, max_per_img=None, nms=None),
        'rcnn': dict(score_thr=None, max_per_img=None, nms=None),
    }
    predictors = 'rpn_cls', 'rpn_reg', 'fc_cls', 'fc_reg', 'conv_logits'

    def __init__(self, detector: nn.Module, operators: BoxOperators) -> None:
        super().__init__(detector, operators)
        self.check()
        self._make_heads(merged=False)

    def _make_heads(self, merged: bool) -> None:
        self.rpn = RPN(self.detector.rpn_head, merged)
        self.box_heads = [BoxHead(head, merged) for head in self.stages('bbox_head')]
        self.mask_heads = [MaskHead(head, merged) for head in self.stages('mask_head')] if self.has_masks else []

    def merge_weights(self) -> None:
        self._make_heads(merged=True)

    def check(self) -> None:
        """Raises :class:`Unsupported` unless the family computes what ``predict`` of the detector computes."""
        rpn_head = find_part(self.detector, 'rpn_head', RPNHead, DENSE_PREDICTION)
        roi_head = find_part(self.detector, 'roi_head', self.heads[0], ROI_PREDICTION)
        find_part(rpn_head, 'prior_generator', AnchorGenerator)
        require('an rpn_head with sigmoid scores', rpn_head.use_sigmoid_cls)
        require('a positive max_per_img in test_cfg.rpn', rpn_head.test_cfg.max_per_img > 0)
        require('a roi_head without shared_head', not roi_head.with_shared_head)
        for head in self.stages('bbox_head'):
            check_part(head, 'bbox_head', BBoxHead, BOX_PREDICTION)
            require('a bbox_head with softmax and box regression', not head.custom_cls_channels and head.with_reg)
        for name, cfg in (('rpn_head', rpn_head.test_cfg), ('bbox_head', roi_head.test_cfg)):
            check_nms(name, cfg)
        for head in (rpn_head, *self.stages('bbox_head')):
            check_deltas(head)
        if self.has_masks:
            for head in self.stages('mask_head'):
                check_part(head, 'mask_head', FCNMaskHead, MASK_PREDICTION)
            require('a mask_thr_binary of at least 0 in test_cfg.rcnn', roi_head.test_cfg.mask_thr_binary >= 0)
        for name in self.extractor_names:
            for extractor in self.stages(name):
                check_part(extractor, name, SingleRoIExtractor)
                pools = [getattr(layer, 'pool_mode', '') for layer in extractor.roi_layers]
                require("roi_layers of pool_mode='avg'", {*pools} == {'avg'})

    @classmethod
    def absorbs(cls, detector: nn.Module) -> bool:
        return super().absorbs(detector) and type(detector.rpn_head) is RPNHead

    @classmethod
    @torch.no_grad()
    def find_regions(
        cls, detector: nn.Module, images: Tensor, samples: Sequence[DetDataSample], share: float
    ) -> Regions:
        maps, metas, roi_head = detector.extract_feat(images), [s.metainfo for s in samples], detector.roi_head
        weights = weigh_positions(detector.rpn_head(maps)[0])
        proposals = detector.rpn_head.predict(maps, samples, rescale=False)
        if share < math.inf:
            proposals = [part[: math.ceil(share * PROPOSALS)] for part in proposals]
        rois, extractors = bbox2roi([part.bboxes for part in proposals]), _stages(roi_head.bbox_roi_extractor)
        stages = []
        with ExitStack() as stack:
            for extractor in extractors:
                hook = extractor.register_forward_pre_hook(lambda module, args: stages.append(args[1].clone()))
                stack.callback(hook.remove)
            found = roi_head.predict_bbox(maps, metas, proposals, roi_head.test_cfg, rescale=False)
        # Without proposals no box head runs.
        detections = [part.bboxes for part in found]
        if share < math.inf:
            # Evenly by rank, so that the fits see masks of sure and of unsure detections.
            detections = [part[:BEST][:: math.ceil(BEST / (share * DETECTIONS))] for part in detections]
        return Regions(weights, stages or [rois] * len(extractors), bbox2roi(detections))

    @classmethod
    def run_heads(cls, detector: nn.Module, maps: Sequence[Tensor], regions: Regions) -> None:
        detector.rpn_head(maps)
        roi_head = detector.roi_head
        stages = cls.stage_arguments(len(regions.proposals))
        for stage, rois in zip(stages, regions.proposals, strict=True):
            roi_head._bbox_forward(*stage, maps, rois)
        for stage in stages if detector.with_mask else ():
            roi_head._mask_forward(*stage, maps, regions.detections)

    @classmethod
    def stage_arguments(cls, count: int) -> list[tuple]:
        """The first arguments of mmdet's forwards of a stage, for each stage."""
        return [()] * count

    def stages(self, name: str) -> list[nn.Module]:
        """Returns a part of the RoI head, of each of its stages."""
        return _stages(getattr(self.detector.roi_head, name, None))

    def check_fixed(self) -> None:
        # Kernels of NMS count pairs of anchors in 32 bits.
        require('a positive nms_pre in test_cfg.rpn', self.detector.rpn_head.test_cfg.get('nms_pre', -1) > 0)
        extractors = [extractor for name in self.extractor_names for extractor in self.stages(name)]
        require('square RoIAlign with sampling_ratio=0 on up to four levels', all(map(can_pool, extractors)))

    @property
    def test_cfgs(self) -> tuple[dict, dict]:
        return self.detector.rpn_head.test_cfg, self.detector.roi_head.test_cfg

    @property
    def has_masks(self) -> bool:
        return self.detector.with_mask

    @property
    def extractor_names(self) -> tuple[str, ...]:
        return ('bbox_roi_extractor', 'mask_roi_extractor')[: 1 + self.has_masks]

    def detect(self, features: Sequence[Tensor], frame: Frame, score_thr: float | Tensor) -> Objects:
        proposals = self.propose(features, frame.limits)
        first_is_number = self.operators.first_is_number(proposals[1])
        corners, scores, labels, exact = self.classify(features, proposals, frame, score_thr)
        if exact is not None:
            exact = exact & first_is_number
        if not self.has_masks:
            return Objects(corners, scores, labels, exact)
        mask_logits = self.find_masks(features, corners, scores, labels)
        in_image = corners if frame.scale is None else corners / frame.scale
        return Objects(in_image, scores, labels, exact, mask_logits)

    def propose(self, features: Sequence[Tensor], limits: Tensor) -> tuple[Tensor, Tensor]:
        """Makes proposals: decodes the best anchors of each level, and applies NMS per level.

        See Faster R-CNN (Ren et al., NeurIPS 2015).

        Args:
            features: The maps of the neck.
            limits: The image's (width, height, width, height).

        Returns:
            Corners (n, 4) and scores (n,) of the proposals, best first.
        """
        head, operators = self.detector.rpn_head, self.operators
        levels, deltas, sizes = self.rpn(features)
        priors = operators.priors(head.prior_generator, sizes, deltas)
        scores, index, level = operators.topk(levels, head.test_cfg.get('nms_pre', -1))
        corners = operators.decode(head.bbox_coder, priors, deltas, limits, index)
        smallest = head.test_cfg.get('min_bbox_size', -1)
        if smallest >= 0:
            scores = torch.where((corners[..., 2:] - corners[..., :2]).amin(-1) > smallest, scores, EMPTY)
        stride = operators.stride(corners, scores)
        iou_threshold, limit = head.test_cfg.nms.iou_threshold, head.test_cfg.max_per_img
        scores, kept = operators.suppress(corners, scores, level, stride, iou_threshold, limit)
        return corners.reshape(-1, 4)[kept], scores

    def classify(
        self, features: Sequence[Tensor], proposals: tuple[Tensor, Tensor], frame: Frame, score_thr: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Decodes each class of each proposal, applies NMS per class, and returns the best boxes of all classes.

        Args:
            features: The maps of the neck.
            proposals: Their corners and scores.
            frame: The frame of the image.
            score_thr: Drops boxes with a score up to this one.

        Returns:
            Corners, scores, labels, and whether mmdet would return the same (see :class:`Objects`). With masks,
            corners are in the pixels of the image, and otherwise in the original image.
        """
        operators, head = self.operators, self.stages('bbox_head')[-1]
        proposed, found, logits, deltas = self.regress(features, *proposals, frame.limits)
        scores = operators.class_scores(logits, found, score_thr)
        classes = head.num_classes
        deltas = deltas.reshape(-1, 1 if head.reg_class_agnostic else classes, 4)
        corners = operators.decode(head.bbox_coder, proposed, deltas, frame.limits)
        # With masks, mmdet suppresses boxes before it rescales them to the original image.
        if frame.rescale is not None and not self.has_masks:
            corners = corners * frame.rescale
        if head.reg_class_agnostic:
            corners = corners.expand(-1, classes, 4)
        return self.choose(scores.reshape(-1), corners.reshape(-1, 4), lambda index: index % classes)[:4]

    def regress(
        self, features: Sequence[Tensor], boxes: Tensor, scores: Tensor, limits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes the logits and deltas of proposals, whose order may change.

        Args:
            features: The maps of the neck.
            boxes: Corners of the proposals, (n, 4).
            scores: Their scores, (n,).
            limits: The image's (width, height, width, height).

        Returns:
            The boxes that the deltas refer to (n, 4); the scores of the proposals (n,); logits (n, classes + 1); deltas
            (n, 4) or (n, 4 classes).
        """
        (extractor,) = self.stages('bbox_roi_extractor')
        regions, order = self.operators.pool(extractor, features, boxes, scores)
        if order is not None:
            boxes, scores = boxes[order], scores[order]
        return boxes, scores, *self.box_heads[0](regions)

    def find_masks(
        self, features: Sequence[Tensor], corners: Tensor, scores: Tensor, labels: Tensor
    ) -> tuple[Tensor, ...]:
        """Computes the mask logits (n, 28, 28) of boxes, in each stage."""
        (extractor,) = self.stages('mask_roi_extractor')
        regions, order = self.operators.pool(extractor, features, corners, scores)
        return (self.mask_heads[0](regions, labels, order),)


class RPN:
    """Computes the logits (n_i,) and the size of each level's anchors, and the deltas (A, 4) of all anchors.

    Args:
        head: The RPN.
        merged: Whether one product with copied weights gives logits and deltas; ignored unless rpn_conv is a FusedConv.
    """

    def __init__(self, head: RPNHead, merged: bool) -> None:
        self.head = head
        is_stock = (type(head).forward, type(head).forward_single) == (RPNHead.forward, RPNHead.forward_single)
        self.merged = merged and is_stock and isinstance(head.rpn_conv, FusedConv)
        if self.merged:
            layers = head.rpn_cls, head.rpn_reg
            # Pads the rows of ``outputs`` to a multiple of 16 bytes.
            missing = -sum(layer.out_channels for layer in layers) % 8
            self.weight = F.pad(torch.cat([layer.weight.flatten(1) for layer in layers]), (0, 0, 0, missing)).detach()
            self.bias = F.pad(torch.cat([layer.bias for layer in layers]), (0, missing)).detach()

    def __call__(self, features: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, list[tuple]]:
        if not self.merged:
            logits, deltas = self.head(features)
            levels, deltas = [to_rows(x, 1).flatten() for x in logits], torch.cat([to_rows(x, 4) for x in deltas])
            return levels, deltas, [x.shape[-2:] for x in logits]
        sizes = [len(x) * x.shape[2] * x.shape[3] for x in features]
        outputs = features[0].new_empty(sum(sizes), len(self.weight), dtype=self.weight.dtype)
        for part, x in zip(outputs.split(sizes), features, strict=True):
            hidden = self.head.rpn_conv(x.to(self.weight.dtype), relu=True)
            torch.addmm(self.bias, to_rows(hidden, hidden.shape[1]), self.weight.t(), out=part)
        anchors = self.head.rpn_cls.out_channels
        logits, deltas = outputs[:, :anchors].float(), outputs[:, anchors : 5 * anchors]
        levels = list(logits.flatten().split([anchors * size for size in sizes]))
        return levels, deltas.reshape(-1, 4).float(), [x.shape[-2:] for x in features]


class BoxHead:
    """Computes class logits (n, classes + 1) and deltas (n, 4 classes) of regions (n, C, h, w).

    Args:
        head: The bbox_head.
        merged: Whether copied weights read channels-last regions; ignored unless the head has linear layers only.
    """

    def __init__(self, head: nn.Module, merged: bool) -> None:
        self.head, self.merged = head, merged and _is_linear(head)
        if self.merged:
            first, *others = head.shared_fcs
            by_position = first.weight.detach().unflatten(1, (-1, *head.roi_feat_size))
            self.shared = [(by_position.permute(0, 2, 3, 1).flatten(1), first.bias)]
            self.shared += [(layer.weight, layer.bias) for layer in others]
            self.weight = torch.cat([head.fc_cls.weight, head.fc_reg.weight]).detach()
            self.bias = torch.cat([head.fc_cls.bias, head.fc_reg.bias]).detach()

    def __call__(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.merged:
            return self.head(regions)
        x = regions.permute(0, 2, 3, 1).flatten(1).to(self.weight.dtype)
        for weight, bias in self.shared:
            x = linear_relu(x, weight, bias)
        outputs = F.linear(x, self.weight, self.bias).float()
        return outputs.split([self.head.fc_cls.out_features, self.head.fc_reg.out_features], 1)


def _is_linear(head: nn.Module) -> bool:
    """Whether a head has only shared linear layers with ReLU, and one linear layer each for classes and boxes."""
    if type(head).forward is not ConvFCBBoxHead.forward or head.with_avg_pool or not head.num_shared_fcs:
        return False
    others = *head.shared_convs, *head.cls_convs, *head.cls_fcs, *head.reg_convs, *head.reg_fcs
    return not others and all(type(x) is nn.Linear for x in (*head.shared_fcs, head.fc_cls, head.fc_reg))


class MaskHead:
    """Computes mask logits (n, 28, 28) of regions (n, C, 14, 14), each for the label of its box, in the order of boxes.

    The ``order`` of regions is the result of :meth:`BoxOperators.pool`.

    Args:
        head: The mask_head.
        merged: Compute the mask of each box's own label alone. Without effect unless a transposed convolution of kernel
            2 and stride 2 upsamples the masks.
    """

    def __init__(self, head: FCNMaskHead, merged: bool) -> None:
        self.head = head
        up, last = head.upsample, head.conv_logits
        self.merged = merged and type(head).forward is FCNMaskHead.forward and type(up) is nn.ConvTranspose2d
        self.merged = self.merged and up.kernel_size == up.stride == (2, 2) and isinstance(last, nn.Conv2d)
        if self.merged:
            # One product upsamples: each quarter of its columns is one of the four pixels that replace a pixel.
            self.up_weight = up.weight.detach().permute(2, 3, 1, 0).flatten(0, 2).contiguous()
            self.up_bias = up.bias.detach().repeat(4)

    def __call__(self, regions: Tensor, labels: Tensor, order: Tensor | None) -> Tensor:
        head = self.head
        if order is not None:
            row = torch.arange(order.shape[0])
            label = torch.zeros_like(order) if head.class_agnostic else labels[order]
            return head(regions)[row, label][torch.zeros_like(order).scatter(0, order, row)]
        if head.class_agnostic:
            labels = torch.zeros_like(labels)
        if not self.merged:
            return head(regions)[torch.arange(len(labels), device=labels.device), labels]
        x = regions.to(self.up_weight.dtype)
        for conv in head.convs:
            x = conv(x)
        count, _, height, width = x.shape
        x = linear_relu(to_rows(x, x.shape[1]), self.up_weight, self.up_bias).view(count, height * width * 4, -1)
        weight, bias = head.conv_logits.weight.flatten(1)[labels], head.conv_logits.bias[labels]
        logits = torch.bmm(x, weight[:, :, None])[..., 0].float() + bias[:, None].float()
        return logits.view(count, height, width, 2, 2).transpose(2, 3).reshape(count, 2 * height, 2 * width)


def _stages(part: nn.Module | None) -> list[nn.Module | None]:
    return [*part] if isinstance(part, nn.ModuleList) else [part]


def _rpn_channels(head: RPNHead) -> list[Channels]:
    return [Channels('rpn_conv', ('rpn_conv',), ('rpn_cls', 'rpn_reg'))] if isinstance(head.rpn_conv, nn.Conv2d) else []


def _box_head_channels(head: ConvFCBBoxHead) -> Iterator[Channels]:
    """The outputs of each shared linear layer; separate branches of classes and boxes keep their channels."""
    if [*head.cls_convs, *head.cls_fcs, *head.reg_convs, *head.reg_fcs] or not (head.with_cls and head.with_reg):
        return
    names = [f'shared_fcs.{i}' for i in range(len(head.shared_fcs))]
    for i, name in enumerate(names):
        yield Channels(name, (name,), (names[i + 1],) if i + 1 < len(names) else ('fc_cls', 'fc_reg'))


def _box_head_input(head: ConvFCBBoxHead) -> tuple[str, ...]:
    if head.num_shared_convs:
        return ('shared_convs.0.conv',)
    return ('shared_fcs.0',) if head.num_shared_fcs else ()


def _mask_head_channels(head: FCNMaskHead) -> Iterator[Channels]:
    """The outputs of each convolution, and of the transposed convolution that enlarges the map."""
    if head.upsample_method != 'deconv':
        yield from tower_channels(head, 'convs')
        return
    yield from tower_channels(head, 'convs', ('upsample',))
    yield Channels('upsample', ('upsample',), ('conv_logits',), ('relu',))


register_folds(RPNHead, hidden_channels=_rpn_channels, input_layers=lambda head: ('rpn_conv',))
register_folds(
    ConvFCBBoxHead,
    Shared2FCBBoxHead,
    Shared4Conv1FCBBoxHead,
    hidden_channels=_box_head_channels,
    input_layers=_box_head_input,
)
register_folds(
    FCNMaskHead, hidden_channels=_mask_head_channels, input_layers=lambda head: ('convs.0.conv',) * (head.num_convs > 0)
)
