"""A student learns from its teacher: losses against their formula, and a whole run with labels."""

import copy
from pathlib import Path

import mmcv
import numpy as np
import pytest
import torch
from conftest import CONFIGS, SMALL_SWIN, as_trained, build_detector_cfg, randomize, small_mmdet_cfg
from mmdet.apis import DetInferencer
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from mmengine.config import Config
from mmengine.runner import Runner
from torch.distributions import Bernoulli, Categorical, kl_divergence

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.common.errors import CheckpointError, ConversionError
from slab_det.conversion import write_tune_config
from slab_det.conversion.distill import NUM_DETECTIONS, NUM_PROPOSALS, Distillation
from slab_det.fusion import save_fused
from slab_det.fusion.channels import find_channels
from slab_det.preflight import set_data_root
from slab_det.recalibration import recalibration_dataloader

# Of a Mask R-CNN.
LOSSES = {'loss_features', 'loss_dense', 'loss_dense_boxes', 'loss_roi', 'loss_roi_boxes', 'loss_masks'}


def describe_images(images):
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), tuple(images.shape[-2:]))
    return [DetDataSample(metainfo=shapes) for _ in images]


def relative(outputs, targets, weight=1.0):
    return (weight * (outputs - targets).pow(2)).sum() / (weight * targets.pow(2)).sum()


def divergence(outputs, targets):
    """Of logits of independent classes."""
    return kl_divergence(Bernoulli(logits=targets), Bernoulli(logits=outputs))


def compare_classes(outputs, targets):
    """The divergence of classes of boxes, where the surest background counts a tenth of a sure object."""
    weight = 0.1 + 0.9 * (1 - targets.softmax(1)[:, -1])
    return (weight * kl_divergence(Categorical(logits=targets), Categorical(logits=outputs))).sum() / weight.sum()


def test_losses_compare_features_rpn_and_roi_head_where_the_teacher_sees_objects(small_detector):
    teacher, student = small_detector(seed=0), small_detector(seed=1)
    teacher.rpn_head.test_cfg.update(nms_pre=300, max_per_img=300)
    teacher.roi_head.test_cfg.score_thr = 0.0
    images = torch.randn(2, 3, 64, 96)
    samples = describe_images(images)
    with torch.no_grad():
        s, t = student.extract_feat(images), teacher.extract_feat(images)
        proposals = [found[:NUM_PROPOSALS] for found in teacher.rpn_head.predict(t, samples, rescale=False)]
        assert [len(found) for found in proposals] == [NUM_PROPOSALS] * 2
        (own_logits, own_deltas), (logits, deltas) = student.rpn_head(s), teacher.rpn_head(t)
        rois = bbox2roi([found.bboxes for found in proposals])
        own, wanted = (model.roi_head._bbox_forward(maps, rois) for model, maps in ((student, s), (teacher, t)))
        metas = [sample.metainfo for sample in samples]
        found = teacher.roi_head.predict_bbox(t, metas, proposals, teacher.roi_head.test_cfg)
        found = [part[:NUM_DETECTIONS] for part in found]
        assert [len(part) for part in found] == [NUM_DETECTIONS] * 2
        rois, labels = bbox2roi([part.bboxes for part in found]), torch.cat([part.labels for part in found])
        own_masks, masks = (
            model.roi_head._mask_forward(maps, rois)['mask_preds'][range(len(labels)), labels]
            for model, maps in ((student, s), (teacher, t))
        )
        scores = torch.cat([part.scores for part in found])
        losses = Distillation(teacher)(student, s, images, samples)
    objects = sum(x.sigmoid().sum() for x in logits)
    positions = [
        x.sigmoid().amax(1, keepdim=True).expand(-1, y.shape[1], -1, -1) for x, y in zip(logits, deltas, strict=True)
    ]
    flat = [torch.cat([x.flatten() for x in maps]) for maps in (own_deltas, deltas, positions)]
    expected = dict(
        loss_features=5 * sum(map(relative, s, t)) / len(t),
        loss_dense=sum(map(torch.sum, map(divergence, own_logits, logits))) / objects,
        loss_dense_boxes=relative(*flat),
        loss_roi=3 * compare_classes(own['cls_score'], wanted['cls_score']),
        loss_roi_boxes=relative(own['bbox_pred'], wanted['bbox_pred'], 1 - wanted['cls_score'].softmax(1)[:, -1:]),
        loss_masks=3 * (scores * divergence(own_masks, masks).mean((1, 2))).sum() / scores.sum(),
    )
    torch.testing.assert_close(losses, expected)


def test_the_teacher_moves_with_the_student_that_learns_and_with_no_copy(absorbed):
    """EMAHook(device='cpu') moves its average of the student, and a comparison in float64 casts a copy of it."""
    cfg, teacher, *_ = absorbed
    model = dict(type='mmdet.DistilledDetector', student=cfg.model, teacher=cfg.model, teacher_checkpoint=str(teacher))
    student = MODELS.build(copy.deepcopy(model))
    reference = student.distillation.teacher
    copy.deepcopy(student).double(), copy.deepcopy(student).to('meta')
    assert {(p.dtype, p.device.type) for p in reference.parameters()} == {(torch.float32, 'cpu')}
    images = torch.randn(1, 3, 64, 64).double()
    student.double().distillation(student, student.extract_feat(images), images, describe_images(images))
    assert {p.dtype for p in reference.parameters()} == {torch.float64}


# The padded windows follow the first norm; only the FPN reads the second.
KEPT = ['backbone.stages.0.blocks.0.norm1', 'backbone.norm3']


@pytest.fixture(scope='module')
def absorbed(module_run_cfg, tmp_path_factory):
    """Config of a LayerNorm run, its checkpoint, and the fused config and checkpoint of a student of it."""
    folder, cfg = tmp_path_factory.mktemp('absorbed'), module_run_cfg(norm_cfg=dict(type='LN'), drop_path_rate=0.5)
    cfg.custom_hooks = [dict(type='RecalibrateFuseHook')]
    # AP of random weights says nothing.
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    teacher = build_detector(cfg)
    torch.save(dict(state_dict=randomize(teacher).state_dict()), folder / 'teacher.pth')
    student = slab_det.absorb(teacher, recalibration_dataloader(cfg, 4, 'test'), 1, KEPT, progress=False)
    checkpoint, config = save_fused(student, cfg, folder / 'absorbed.pth')
    return cfg, folder / 'teacher.pth', config, checkpoint


def tune_cfg(absorbed, name):
    cfg, teacher, fused_config, checkpoint = absorbed
    schedule = Config.fromfile(CONFIGS / '_base_/schedules/tune_absorbed.py')
    schedule.train_cfg = dict(type='IterBasedTrainLoop', max_iters=2)
    schedule.param_scheduler[0].end = schedule.param_scheduler[1].begin = 1
    path = write_tune_config(cfg, fused_config, checkpoint, teacher, schedule)
    assert path == checkpoint.with_name('absorbed_tune_config.py')
    new = Config.fromfile(path)
    new.default_hooks.checkpoint.interval = 1
    new.work_dir, new.experiment_name = str(checkpoint.parent / name), f'{checkpoint.parent.name}-{name}'
    return new


@pytest.fixture(scope='module')
def whole_run(absorbed):
    runner = Runner.from_cfg(tune_cfg(absorbed, 'whole'))
    runner.train()
    return runner


def test_a_run_with_labels_writes_checkpoints_of_the_fused_config(absorbed, whole_run):
    rates = {id(p): group['lr'] for group in whole_run.optim_wrapper.param_groups for p in group['params']}
    lowest = min(rates.values())
    for name, parameter in whole_run.model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(lowest * (1 if name.startswith('backbone') else 10)), name
    logged = whole_run.message_hub.log_scalars
    assert {'train/loss_rpn_cls', *(f'train/{name}' for name in LOSSES)} <= logged.keys()
    teacher = whole_run.model.distillation.teacher
    assert not any(part.training for part in teacher.modules())
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    before = torch.load(absorbed[1], weights_only=False)['state_dict']
    torch.testing.assert_close(dict(teacher.state_dict()), dict(before), rtol=0, atol=0)

    last = Path(whole_run.work_dir) / 'iter_2.pth'
    fused, untuned = (build_detector(Config.fromfile(absorbed[2]), str(path)) for path in (last, absorbed[3]))
    images = torch.randn(1, 3, 70, 90)
    student = copy.deepcopy(whole_run.model).eval()
    with torch.no_grad():
        maps, served, old = (model.extract_feat(images) for model in (student, fused, untuned))
    torch.testing.assert_close(served, maps)
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(served, old, strict=True))
    assert DetInferencer(str(absorbed[2]), str(last), device='cpu', show_progress=False)


def test_a_student_is_fused_and_served_without_its_teacher(absorbed, tmp_path):
    cfg, teacher, *_ = absorbed
    cfg, student = copy.deepcopy(cfg), copy.deepcopy(cfg.model)
    student.backbone.norm_cfg = dict(type='TokenBN')
    cfg.model = dict(
        type='mmdet.DistilledDetector', student=student, teacher=cfg.model, teacher_checkpoint=str(teacher)
    )
    trained = as_trained(build_detector(cfg))
    fused = slab_det.fuse(trained)
    # The norms of the outputs too: the neck alone reads them, as in the student's own class.
    assert {norm.outcome for norm in fused.fusion_report.norms} == {'folded'}, fused.fusion_report
    checkpoint, config = save_fused(fused, cfg, tmp_path / 'fused.pth')
    served_cfg, images = Config.fromfile(config), torch.randn(1, 3, 70, 90)
    assert served_cfg.model.model.type == student.type
    served = build_detector(served_cfg, str(checkpoint))
    with torch.no_grad():
        for one, other in zip(trained.extract_feat(images), served.extract_feat(images), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope='module')
def narrowed(module_run_cfg, tmp_path_factory):
    """A function: as ``absorbed``, for a student of a kind of detector whose FPN lost half of its channels."""

    def make(kind):
        folder = tmp_path_factory.mktemp('narrowed')
        cfg = module_run_cfg(f'narrowed-{kind}', norm_cfg=dict(type='LN'))
        if kind == 'faster_rcnn':
            cfg.model.type, cfg.model.roi_head.mask_head = 'FasterRCNN', None
        elif kind != 'mask_rcnn':
            cfg.model = small_mmdet_cfg(MMDET[kind], {**SMALL_SWIN, 'norm_cfg': dict(type='LN')})
            for head in cfg.model.roi_head.bbox_head if 'roi_head' in cfg.model else [cfg.model.bbox_head]:
                head.num_classes = 4
        cfg.custom_hooks = []
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
        teacher = build_detector(cfg)
        torch.save(dict(state_dict=randomize(teacher).state_dict()), folder / 'teacher.pth')
        channels = dict(neck=find_channels(teacher)['neck'].count // 2)
        student = MODELS.build(dict(type='mmdet.FusedDetector', model=cfg.model, folds=[], channels=channels))
        checkpoint, config = save_fused(randomize(student, 1), cfg, folder / 'absorbed.pth')
        return cfg, folder / 'teacher.pth', config, checkpoint

    return make


MMDET = dict(retinanet='retinanet/retinanet_r50_fpn_1x_coco', cascade='cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco')


@pytest.mark.parametrize('kind', ['mask_rcnn', 'faster_rcnn', 'retinanet', 'cascade'])
def test_a_student_whose_fpn_lost_channels_learns_from_the_heads_of_its_teacher(kind, narrowed):
    files = narrowed(kind)
    runner = Runner.from_cfg(tune_cfg(files, 'narrow'))
    before = build_detector(Config.fromfile(files[2]), str(files[3])).neck.fpn_convs[0].conv.weight
    runner.train()
    losses = {key.removeprefix('train/') for key in runner.message_hub.log_scalars if 'loss_' in key}
    # Maps of other channels cannot be compared.
    assert {'loss_dense'} | ({'loss_roi'} if kind != 'retinanet' else set()) <= losses - {'loss_features'} == losses
    last = build_detector(Config.fromfile(files[2]), str(Path(runner.work_dir) / 'iter_2.pth'))
    after = last.neck.fpn_convs[0].conv.weight
    assert after.shape == before.shape and not after.equal(before)


def test_each_stage_of_a_cascade_is_compared():
    cfg = small_mmdet_cfg(MMDET['cascade'], {**SMALL_SWIN, 'norm_cfg': dict(type='LN')})
    teacher = as_trained(MODELS.build(cfg))
    images = torch.randn(1, 3, 64, 96)
    for stage in range(3):
        student = copy.deepcopy(teacher)
        student.roi_head.bbox_head[stage].fc_cls.weight.data *= 2
        student.roi_head.bbox_head[stage].fc_cls.bias.data *= 2
        with torch.no_grad():
            losses = Distillation(teacher)(student, student.extract_feat(images), images, describe_images(images))
            maps = teacher.extract_feat(images)
            found = teacher.rpn_head.predict(maps, describe_images(images), rescale=False)
            logits = teacher.roi_head._bbox_forward(stage, maps, bbox2roi([found[0].bboxes[:NUM_PROPOSALS]]))[
                'cls_score'
            ]
        # One stage of three has twice the logits.
        torch.testing.assert_close(losses.pop('loss_roi'), compare_classes(2 * logits, logits))
        assert not any(losses.values()) and {'loss_features', 'loss_dense', 'loss_roi_boxes'} < losses.keys()


def test_a_box_head_may_predict_more_than_deltas():
    cfg = build_detector_cfg('faster_rcnn')
    sabl = Config.fromstring("_base_ = ['mmdet::sabl/sabl-faster-rcnn_r50_fpn_1x_coco.py']", '.py').model
    widths = ('cls_in_channels', 'reg_in_channels', 'reg_offset_out_channels', 'reg_cls_out_channels')
    cfg.roi_head.bbox_head = sabl.roi_head.bbox_head
    cfg.roi_head.bbox_head.update(dict.fromkeys(widths, cfg.neck.out_channels), num_classes=3)
    teacher = as_trained(MODELS.build(cfg))
    student, images = copy.deepcopy(teacher), torch.randn(1, 3, 64, 96)
    losses = Distillation(teacher)(student, student.extract_feat(images), images, describe_images(images))
    assert {'loss_roi', 'loss_roi_boxes'} < losses.keys() and all(abs(x) < 1e-5 for x in losses.values())
    student.roi_head.bbox_head.fc_reg_cls.weight.data *= 2
    losses = Distillation(teacher)(student, student.extract_feat(images), images, describe_images(images))
    assert losses['loss_roi_boxes'] > 1e-3 and losses['loss_roi_boxes'].isfinite()


def test_a_student_that_can_be_compared_in_nothing_is_refused(small_detector):
    teacher, images = small_detector(), torch.randn(1, 3, 64, 96)
    teacher.rpn_head = teacher.roi_head = None
    maps = [map_[:, :8] for map_ in teacher.extract_feat(images)]
    with pytest.raises(ConversionError, match='different channels, and its heads are not compared'):
        Distillation(teacher)(copy.deepcopy(teacher), maps, images, [])


def test_without_a_task_loss_no_labels_are_read(absorbed):
    cfg = tune_cfg(absorbed, 'unlabelled')
    model = MODELS.build(dict(cfg.model, task_weight=0.0)).train()
    images = torch.randn(1, 3, 64, 64)
    losses = model(images, describe_images(images), mode='loss')
    assert losses.keys() == LOSSES
    assert sum(losses.values()).requires_grad
    # With drop-path 0.5 the two losses would differ.
    torch.testing.assert_close(model(images, describe_images(images), mode='loss'), losses)
    assert model.state_dict().keys() == MODELS.build(cfg.model.student).state_dict().keys()


def test_tuning_on_unlabelled_images_drops_everything_that_reads_labels(absorbed, tmp_path):
    cfg, teacher, fused_config, checkpoint = absorbed
    (tmp_path / 'elsewhere').mkdir()
    for i, size in enumerate([(70, 90), (96, 64), (64, 64)]):
        mmcv.imwrite(np.full((*size, 3), 80 * i, np.uint8), str(tmp_path / f'elsewhere/{i}.png'))
    # Archives of macOS hold such files.
    (tmp_path / 'elsewhere/._0.png').write_bytes(b'no PNG')
    (tmp_path / 'pictures').mkdir()
    (tmp_path / 'pictures/linked').symlink_to(tmp_path / 'elsewhere')
    cfg, fused = copy.deepcopy(cfg), Config.fromfile(fused_config)
    cfg.custom_hooks += [dict(type='NumClassCheckHook'), dict(type='EMAHook', begin_epoch=5)]
    cfg.test_cfg = cfg.test_evaluator = cfg.train_dataloader = None
    fused.model.model.data_preprocessor.batch_augments = [
        dict(type='BatchSyncRandomResize', random_size_range=(64, 96), interval=1)
    ]
    fused.dump(tmp_path / 'fused_config.py')
    # mmdet's OpenImages has a matrix there.
    meta = dict(classes=['a', 'b', 'c', 'd'], RELATION_MATRIX=np.eye(4))
    stored = torch.load(checkpoint, weights_only=False)
    torch.save(dict(stored, meta=dict(dataset_meta=meta)), tmp_path / 'fused.pth')
    schedule = Config.fromfile(CONFIGS / '_base_/schedules/tune_absorbed.py')
    schedule.train_cfg, schedule.param_scheduler = dict(type='IterBasedTrainLoop', max_iters=2), []
    path = write_tune_config(
        cfg, tmp_path / 'fused_config.py', tmp_path / 'fused.pth', teacher, schedule, tmp_path / 'pictures'
    )
    tune = Config.fromfile(path)
    set_data_root(tune, str(tmp_path))
    tune.train_dataloader.update(num_workers=0, persistent_workers=False)
    tune.work_dir, tune.experiment_name = str(tmp_path / 'tuned'), tmp_path.name
    runner = Runner.from_cfg(tune)
    assert len(runner.train_dataloader.dataset) == 3
    runner.train()
    logged = runner.message_hub.log_scalars
    losses = {key.removeprefix('train/') for key in logged if 'loss_' in key}
    assert losses == LOSSES
    last = build_detector(Config.fromfile(fused_config), str(tmp_path / 'tuned/iter_2.pth'))
    assert last.dataset_meta == dict(classes=('a', 'b', 'c', 'd'))


def test_a_wrong_teacher_is_refused(absorbed, tmp_path):
    cfg = tune_cfg(absorbed, 'refused')
    with pytest.raises(CheckpointError, match='the checkpoint is fused'):
        MODELS.build(dict(cfg.model, teacher_checkpoint=str(absorbed[3])))
    with pytest.raises(CheckpointError, match=r'no checkpoint .*missing\.pth'):
        MODELS.build(dict(cfg.model, teacher_checkpoint=str(tmp_path / 'missing.pth')))
