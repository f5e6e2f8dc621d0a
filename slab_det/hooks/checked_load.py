"""CheckedLoadHook: checks and converts the checkpoint that a run loads."""

from __future__ import annotations

from collections.abc import Sequence

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, Runner

from slab_det.checkpoints import check_detector_checkpoint
from slab_det.checkpoints.load import EXPECTED_MISSING
from slab_det.checkpoints.load_report import LoadReport
from slab_det.common.distributed import unwrap
from slab_det.common.errors import CheckpointError


@HOOKS.register_module()
class CheckedLoadHook(Hook):
    """Checks the checkpoint of ``load_from``, ``--resume`` or a test, converts foreign backbones, logs a report.

    CheckpointError is raised if nothing matches, a shape does not fit, or only one of checkpoint and model is fused.
    Missing weights are errors when resuming and testing; a training that starts from ``load_from`` only reports them.
    DataError is raised when resuming and testing if the checkpoint names other classes than the datasets, or in another
    order.

    Args:
        reinitialize: Prefixes of keys that are not loaded, such as ``('roi_head.bbox_head.fc_cls',)`` for another
            number of classes. Used only where a training starts; resuming and testing load all keys.
    """

    # Before EMAHook, which loads the converted weights.
    priority = 'VERY_HIGH'

    def __init__(self, reinitialize: Sequence[str] = ()) -> None:
        self.reinitialize = tuple(reinitialize)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model = unwrap(runner.model)
        # Only train() builds the training loop, before it loads. The config of a test may describe a training too.
        is_training = isinstance(runner._train_loop, BaseLoop)
        starts = is_training and not runner._resume
        name = runner._load_from or 'the checkpoint'
        report = check_detector_checkpoint(model, checkpoint, name, self.reinitialize if starts else ())
        if not starts:
            report.check_complete()
            _check_dataset_classes(runner, checkpoint, name)
        if runner._resume:
            _check_resumable(checkpoint, report, name)


def _check_dataset_classes(runner: Runner, checkpoint: dict, name: str) -> None:
    """Raises DataError if the datasets of this run have other classes than ``checkpoint``, or in another order."""
    # Imports mmdet's datasets, which takes seconds, and registering the hooks does not need them.
    from slab_det.preflight.classes import check_classes, classes_of_meta, metainfo_of, names_classes_in_text

    expected = None if names_classes_in_text(runner.model) else classes_of_meta(checkpoint.get('meta') or {})
    for split, loop in (('train', runner._train_loop), ('val', runner._val_loop), ('test', runner._test_loop)):
        # A loop that this run has not built is a config.
        if isinstance(loop, BaseLoop):
            dataset = loop.dataloader.dataset
            classes, ann_file = metainfo_of(dataset).get('classes'), getattr(dataset, 'ann_file', '')
            check_classes(expected, classes, f'{split} dataset', name, ann_file)


def _check_resumable(checkpoint: dict, report: LoadReport, name: str) -> None:
    """Raises CheckpointError unless ``checkpoint`` holds the state of a training of this very model."""
    if 'message_hub' not in checkpoint or not {'epoch', 'iter'} <= checkpoint.get('meta', {}).keys():
        raise CheckpointError(
            f'{name} cannot be resumed from: it holds weights, but not the state of a training. '
            'Resume from iter_N.pth or epoch_N.pth, or start a new training with --cfg-options load_from=FILE'
        )
    # A checkpoint of the same config may lack only keys that are computed or bookkeeping.
    others = {key: reason for key, reason in report.missing.items() if reason not in EXPECTED_MISSING.values()}
    changed = {**report.converted, **others, **dict.fromkeys(report.unused_unexpected, 'not in this model')}
    if changed:
        key, reason = next(iter(changed.items()))
        raise CheckpointError(
            f'{name} cannot be resumed from: {len(changed)} values belong to another model ({key}: {reason}). '
            'Resume with the config in its work_dir, or start a new training with --cfg-options load_from=FILE'
        )
