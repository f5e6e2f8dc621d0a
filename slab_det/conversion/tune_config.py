"""write_tune_config: the config that trains an absorbed detector towards its teacher."""

from __future__ import annotations

import math
from pathlib import Path

from mmengine.config import Config

from slab_det.common.config import add_imports, detector_config, drop_pretrained, to_values, type_name
from slab_det.common.errors import ConversionError
from slab_det.common.pipeline import find_test_pipeline
from slab_det.runtime import read_checkpoint
from slab_det.runtime.run_folder import write_config

# As configs/_base_/runtime.py has them.
DEFAULT_HOOKS = dict(
    checked_load=dict(type='CheckedLoadHook'),
    exact_resume=dict(type='ExactResumeHook'),
    norm_state=dict(type='NormStateHook'),
    finite_loss=dict(type='FiniteLossHook'),
)
# Keys that a written config takes from the schedule; all other keys stay as in the detector's config.
SCHEDULE_KEYS = ('train_cfg', 'optim_wrapper', 'param_scheduler', 'auto_scale_lr', 'custom_hooks')
# Custom hooks of the detector's config that a written config drops: the first two served its old norms, and the average
# of EMAHook hardly moves in so short a training.
REPLACED_HOOKS = ('ProgressiveNormHook', 'RecalibrateFuseHook', 'EMAHook')


def write_tune_config(
    cfg: Config,
    fused_config: str | Path,
    fused_checkpoint: str | Path,
    teacher_checkpoint: str | Path,
    schedule: Config,
    images: str | Path | None = None,
) -> Path:
    """Writes ``<stem>_tune_config.py`` beside an absorbed detector's checkpoint; it trains the detector further.

    The detector learns from its teacher, see :func:`slab_det.conversion.distill.DistilledDetector`, and from the labels
    of the training set. Checkpoints of the run load into ``fused_config``.

    Args:
        cfg: The config that the LayerNorm detector, now the teacher, was trained with.
        fused_config: The config that :func:`slab_det.fusion.save_fused` wrote for the absorbed detector.
        fused_checkpoint: The weights of the absorbed detector, ending in .pth.
        teacher_checkpoint: The teacher's weights.
        schedule: A config with any of ``SCHEDULE_KEYS``, for example configs/_base_/schedules/tune_absorbed.py.
        images: A folder of images to train on, with the test-time pipeline, without labels, validation and test.

    Returns:
        The path of the written config.

    Raises:
        ConversionError: If neither ``schedule`` nor ``cfg`` says how long to train.
        DataError: If there are ``images``, and ``cfg`` has no test-time pipeline for them.
    """
    fused_checkpoint = Path(fused_checkpoint)
    values, student = to_values(cfg), Config.fromfile(fused_config).model.to_dict()
    teacher = values['model']
    drop_pretrained(teacher)
    if 'data_preprocessor' in values:
        # The runner would pass it to DistilledDetector, which does not take it.
        teacher.setdefault('data_preprocessor', values.pop('data_preprocessor'))
    values['model'] = dict(
        type='mmdet.DistilledDetector',
        student=student,
        teacher=teacher,
        teacher_checkpoint=_absolute(teacher_checkpoint),
    )
    if images is not None:
        dataset = dict(type='mmdet.ImageFolder', folder=_absolute(images), pipeline=find_test_pipeline(cfg))
        dataset_meta = read_checkpoint(fused_checkpoint)['meta'].get('dataset_meta')
        if isinstance(dataset_meta, dict) and dataset_meta.get('classes'):
            # Only the classes: other entries, such as OpenImages' matrix, cannot be written to a config.
            dataset['metainfo'] = dict(classes=tuple(dataset_meta['classes']))
        _train_without_labels(values, dataset)
    path = fused_checkpoint.with_name(f'{fused_checkpoint.stem}_tune_config.py')
    write_config(_with_schedule(values, schedule, fused_checkpoint), path)
    return path


def _train_without_labels(values: dict, dataset: dict) -> None:
    """Makes a dataset without labels the training set of a config, in place, and removes what reads labels."""
    values['train_dataloader'] = dict(
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        sampler=dict(type='InfiniteSampler', shuffle=True),
        dataset=dataset,
    )
    values['model']['task_weight'] = 0.0
    preprocessor = detector_config(values['model']).get('data_preprocessor') or {}
    for key in ('batch_augments', 'pad_mask', 'pad_seg'):
        preprocessor.pop(key, None)
    # Heads that are not compared, such as DETR's, get no gradient.
    values.update(custom_hooks=[], find_unused_parameters=True)
    values.update({f'{split}_{part}': None for split in ('val', 'test') for part in ('cfg', 'dataloader', 'evaluator')})


def _absolute(path: str | Path) -> str:
    """The absolute path, for a config that may be read from any folder; a URL stays as it is."""
    return str(path) if '://' in str(path) else str(Path(path).resolve())


def _with_schedule(values: dict, schedule: Config, checkpoint: Path) -> Config:
    """Returns a config that trains ``checkpoint`` by ``schedule``; edits ``values``, the detector's config.

    Custom hooks of ``values`` stay, except for ``REPLACED_HOOKS``. Checkpoints, logs and the sampler follow
    ``train_cfg``: they count epochs or iterations.
    """
    hooks = [hook for hook in values.get('custom_hooks') or [] if type_name(hook['type']) not in REPLACED_HOOKS]
    changes = schedule.to_dict()
    values.update({key: changes[key] for key in SCHEDULE_KEYS if key in changes})
    values['custom_hooks'] = hooks + (changes.get('custom_hooks') or [])
    train_cfg = values.get('train_cfg') or {}
    by_epoch = 'max_epochs' in train_cfg
    if not by_epoch and 'max_iters' not in train_cfg:
        raise ConversionError(
            'neither the schedule nor the config of the detector has a train_cfg with max_epochs or max_iters; give a '
            'schedule that has one, such as configs/_base_/schedules/tune_absorbed.py'
        )
    values['default_hooks'] = {**DEFAULT_HOOKS, **(values.get('default_hooks') or {})}
    saving = values['default_hooks'].setdefault('checkpoint', dict(type='CheckpointHook'))
    # An interruption costs a third of the run at most.
    saving.update(by_epoch=by_epoch, interval=1 if by_epoch else math.ceil(train_cfg['max_iters'] / 3))
    saving.pop('save_begin', None)
    values['log_processor'] = {'type': 'LogProcessor', **(values.get('log_processor') or {}), 'by_epoch': by_epoch}
    # An epoch of InfiniteSampler never ends. With DefaultSampler, a loop of iterations starts its workers every epoch.
    samplers = ('DefaultSampler', 'InfiniteSampler')
    sampler = (values.get('train_dataloader') or {}).get('sampler')
    if sampler and type_name(sampler['type']) in samplers:
        values['train_dataloader']['sampler'] = dict(type=samplers[not by_epoch], shuffle=sampler.get('shuffle', True))
    # mmdet finds slab_det's classes then.
    add_imports(values, 'slab_det')
    values.update(load_from=_absolute(checkpoint), resume=False)
    values.pop('work_dir', None)
    return Config(values)
